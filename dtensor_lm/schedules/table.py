"""A pipeline schedule as a table: for each pipeline rank, what it does, in order.

    Action.parse("3I7")                    # the gradient of stage 3's input, for micro-batch 7
    Schedule("mine", placement=loop(ranks=2, virtual_stages=1), micro_batches=1,
             rows=(row("0F0 0B0"), row("1F0 1B0")))

A table says what a rank computes and in which order, not when and not what it sends: communication follows from the
table (`checker` says how). So idle slots are no part of it; `simulator` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

KINDS = {
    "F": "forward",
    "B": "backward: the gradients of the stage's input and of its weights",
    "I": "the first half of a backward: the gradient of the stage's input, which the stage before waits for",
    "W": "the second half of a backward: the gradients of the stage's weights, which nobody waits for",
}
_TEXT = re.compile(r"(0|[1-9][0-9]*)([FBIW])(0|[1-9][0-9]*)")


class Action(NamedTuple):
    """One computation of one stage on one micro-batch; `str` gives `3I7`, stage 3, kind I, micro-batch 7."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads `3I7`; raises `ValueError` for any other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(int(match[1]), match[2], int(match[3]))


Row = tuple[Action, ...]


def row(text: str) -> Row:
    """The actions of one rank from their names, separated by blanks."""
    return tuple(map(Action.parse, text.split()))


@dataclass(frozen=True)
class Schedule:
    """What every pipeline rank does in one step. Plain data: whether it is sound is `checker`'s question.

    Attributes:
        name: For people; not part of what is run.
        placement: The rank of each stage.
        micro_batches: Their number; they are numbered from 0.
        rows: The actions of each rank, in order.
        training: Whether there are backwards; an evaluation has forwards only.
    """

    name: str
    placement: tuple[int, ...]
    micro_batches: int
    rows: tuple[Row, ...]
    training: bool = True

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def virtual_stages(self) -> int:
        """The most stages that one rank has."""
        return max(map(len, self._stages_by_rank.values()))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return self._stages_by_rank.get(rank, ())

    @cached_property
    def _stages_by_rank(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for stage, owner in enumerate(self.placement):
            found.setdefault(owner, []).append(stage)
        return {owner: tuple(stages) for owner, stages in found.items()}

    @cached_property
    def places(self) -> dict[Action, tuple[int, int]]:
        """(rank, position in its row) of each action, the first one if it is there twice."""
        found: dict[Action, tuple[int, int]] = {}
        for rank, actions in enumerate(self.rows):
            for position, action in enumerate(actions):
                found.setdefault(action, (rank, position))
        return found

    def needs(self, action: Action) -> list[Action]:
        """What has to be done before an action, on its own rank or another."""
        stage, kind, micro_batch = action
        if kind == "F":
            return [Action(stage - 1, "F", micro_batch)] if stage else []
        if kind == "W":
            return [Action(stage, "I", micro_batch)]
        if kind not in "BI":
            return []
        above = [Action(stage + 1, half, micro_batch) for half in "BI"] if stage + 1 < self.stages else []
        sender = [each for each in above if each in self.places] or above
        return [Action(stage, "F", micro_batch), *sender[:1]]

    def __str__(self) -> str:
        what = "" if self.training else ", forwards only"
        lines = [f"{self.name}: {self.ranks} ranks, {self.stages} stages, {self.micro_batches} micro-batches{what}"]
        lines += [f"rank {rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.rows)]
        return "\n".join(lines)


def loop(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks: going up, the last rank is followed by the first."""
    return tuple(range(ranks)) * virtual_stages


def vee(ranks: int, virtual_stages: int = 2) -> tuple[int, ...]:
    """Down the ranks and back up: with two stages per rank, the first and the last stage are on rank 0."""
    down = tuple(range(ranks))
    legs: Iterable[tuple[int, ...]] = (down if leg % 2 == 0 else down[::-1] for leg in range(virtual_stages))
    return tuple(rank for leg in legs for rank in leg)
