"""The pipeline of a Program as data: which stage has which units, and what stages hand over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from dtensor_lm.edges import Collective
from dtensor_lm.layout import Layout
from dtensor_lm.schedules.table import Schedule


@dataclass(frozen=True)
class Link:
    """One call of a unit by the model itself. takes and gives: local tensors in the layout that the model's own code
    has them in; takes: only what depends on the link before."""

    unit: str
    takes: dict[str, Layout]
    gives: tuple[Layout | None, ...]
    single: bool
    cost: float


@dataclass(frozen=True)
class Stage:
    """The links [first, stop). rank: its place on the pipeline's axis. cost: of its forward, any unit."""

    index: int
    rank: int
    first: int
    stop: int
    layers: int
    cost: float


@dataclass(frozen=True)
class Boundary:
    """A tensor that a stage hands to the next one: forward itself, backward its gradient, for each micro-batch."""

    stage: int  # that gives it
    tensor: str
    layout: Layout
    sent: bool  # False where both stages are on one rank
    count: int  # a step


@dataclass(frozen=True)
class Pipeline:
    """How a Program's layers go over the ranks of an axis.

    schedule, evaluation: tables of one run, of which a step has `accumulate`. homes: parameter -> the stages that use
    it, ascending; it is stored on the rank of each, and counted once, on that of the first.
    """

    axis: str
    schedule: Schedule
    evaluation: Schedule
    accumulate: int
    links: tuple[Link, ...]
    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    homes: dict[str, tuple[int, ...]]

    def ranks_of(self, parameter: str) -> tuple[int, ...]:
        """The pipeline ranks that store a parameter, that of its first stage first."""
        return tuple(dict.fromkeys(self.stages[s].rank for s in self.homes[parameter]))

    def takes(self, stage: int) -> dict[str, Layout]:
        """What a stage is handed by the one before it."""
        return self.links[self.stages[stage].first].takes if stage else {}

    def on(self, rank: int) -> tuple[int, ...]:
        return self.schedule.stages_of(rank)

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is in halves."""
        return any(action.kind in "IW" for row in self.schedule.rows for action in row)

    def times(self, stage: int, kind: str) -> int:
        """How often a stage does an action in a step."""
        row = self.schedule.rows[self.stages[stage].rank]
        return self.accumulate * sum(a.stage == stage and a.kind == kind for a in row)

    def shared(self) -> dict[tuple[int, ...], list[str]]:
        """Pipeline ranks -> the parameters that exactly these store, where that is more than one."""
        found: dict[tuple[int, ...], list[str]] = {}
        for name in self.homes:
            if len(ranks := self.ranks_of(name)) > 1:
                found.setdefault(tuple(sorted(ranks)), []).append(name)
        return found

    def sends(self, stages: Iterable[int]) -> Iterator[Collective]:
        """What these stages send to others: tensors forward, gradients backward."""
        for stage in stages:
            for b in self.boundaries:
                size, dtype, axes = b.layout.local_bytes(), b.layout.dtype, (self.axis,)
                if b.sent and b.stage == stage:
                    where = f"stage {stage} -> {stage + 1}: {b.tensor}"
                    yield Collective("send", axes, dtype, size, b.count, "forward", where)
                if b.sent and b.stage == stage - 1:
                    where = f"stage {stage} -> {stage - 1}: gradient of {b.tensor}"
                    yield Collective("send", axes, dtype, size, b.count, "backward", where)
