"""The known schedules, each a pure function from (ranks, virtual stages, micro-batches) to a table.

    generate("interleaved-1f1b", ranks=4, virtual_stages=2, micro_batches=8)

Ranks are p, stages per rank (virtual stages) v, micro-batches m. What a schedule cannot do is a `ScheduleError` that
names the nearest numbers that work.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable

from dtensor_lm.errors import ScheduleError, nearest
from dtensor_lm.schedules.table import Action, Row, Schedule, loop, vee

Generator = Callable[[int, int, int], tuple[Row, ...]]


def gpipe(p: int, v: int, m: int) -> tuple[Row, ...]:
    """All forwards, then all backwards, both in order. Huang et al. 2019, arXiv:1811.06965."""
    return tuple(_all(rank, "F", m) + _all(rank, "B", m) for rank in range(p))


def one_forward_one_backward(p: int, v: int, m: int) -> tuple[Row, ...]:
    """Backward as soon as possible: rank r keeps at most p - r micro-batches, whatever m is.

    PipeDream-Flush: Narayanan et al. 2021, arXiv:2006.09503 and arXiv:2104.04473.
    """
    return tuple(_alternate(_all(r, "F", m), _all(r, "B", m), warmup=p - 1 - r) for r in range(p))


def interleaved_1f1b(p: int, v: int, m: int) -> tuple[Row, ...]:
    """1F1B over v stages per rank, a round of micro-batches after another: the bubble is divided by v.

    Narayanan et al. 2021, arXiv:2104.04473, section 2.2. There a round is p micro-batches; here it may be longer: the
    m micro-batches are divided evenly into m // p rounds.
    """
    size = _round(p, v, m)
    rows = []
    for rank in range(p):
        forwards, backwards = _by_rounds(rank, p, v, m, size)
        rows.append(_alternate(forwards, backwards, warmup=(v - 1) * size + 2 * (p - 1 - rank)))
    return tuple(rows)


def looped_bfs(p: int, v: int, m: int) -> tuple[Row, ...]:
    """Breadth first: a stage does all micro-batches before the rank's next stage begins; backward is the mirror image.

    Lamy-Poirier 2022, arXiv:2211.05953. Weights gathered for a stage serve all micro-batches at once.
    """
    rows = []
    for rank in range(p):
        forwards = [action for stage in range(rank, p * v, p) for action in _all(stage, "F", m)]
        rows.append((*forwards, *(Action(stage, "B", i) for stage, _, i in reversed(forwards))))
    return tuple(rows)


def interleaved_zero_bubble(p: int, v: int, m: int) -> tuple[Row, ...]:
    """Interleaved 1F1B with backwards split: only I is waited for, and W, r of them late on rank r, fills gaps.

    ZB-H1 of Qi et al. 2024, arXiv:2401.10241, section 2, over v stages per rank. With v = 1 it is ZB-H1 itself: every
    rank keeps at most p micro-batches, as the first rank of 1F1B does.
    """
    size = _round(p, v, m)
    rows = []
    for rank in range(p):
        forwards, backwards = _by_rounds(rank, p, v, m, size)
        halves = tuple(action._replace(kind="I") for action in backwards)
        rows.append(_alternate(forwards, halves, warmup=(v - 1) * size + p - 1 - rank, late=rank))
    return tuple(rows)


def zb_v(p: int, v: int, m: int) -> tuple[Row, ...]:
    """Zero bubble in the memory of 1F1B: two stages per rank in a V, so that the last stage is on the first rank.

    Qi et al. 2024, arXiv:2405.15362, and arXiv:2401.10241, section 6. Below 2p - 1 micro-batches it is the table for
    2p - 1 without those that are not there.
    """
    n = max(m, 2 * p - 1)
    rows = []
    for r in range(p):
        line = _Line(down=r, up=2 * p - 1 - r)
        line.add("F0", 2 * (p - r) - 1)
        line.add("F1 F0", r)
        line.add("F1 I1 W1", p - r)
        line.add("F0 I0 W0 F1 I1 W1", n - 2 * p + 1 + r)
        line.add("I0 W0 F1 I1 W1", p - 1 - r)
        line.add("I0 I1", r)
        line.add("I0 W0", p - r)
        line.add("W1", r)
        line.add("W0", r)
        rows.append(tuple(action for action in line.actions if action.micro_batch < m))
    return tuple(rows)


def dualpipe_v(p: int, v: int, m: int) -> tuple[Row, ...]:
    """DualPipe folded into a V: forwards of one stage beside backwards of the other, so that either hides the other's
    communication. Here a pair stands one after the other, forward first; an engine may overlap them.

    DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1; its V shape is of Qi et al. 2024, arXiv:2405.15362.
    """
    rows = []
    for r in range(p):
        line = _Line(down=r, up=2 * p - 1 - r)
        line.add("F0", 2 * (p - 1 - r))
        line.add("F0 F1", r + 1)
        line.add("I1 W F1", p - 1 - r)
        line.add("F0 B1 F1 B0", m - 2 * p + r + 1)
        line.add("B1 F1 B0", p - 1 - r)
        # The second half of the drain is split, so that nobody waits for gradients of weights.
        whole, odd = divmod(r + 1, 2)
        line.add("B1 B0", whole)
        line.add("B1 I0", odd)
        line.add("I1 I0", whole)
        line.add("W I0", p - 1 - r)
        line.add("W", r + 1)
        rows.append(tuple(line.actions))
    return tuple(rows)


# name -> the rows, the placement of stages, and which numbers of virtual stages it has (None is any)
KNOWN: dict[str, tuple[Generator, Callable[[int, int], tuple[int, ...]], int | None]] = {
    "gpipe": (gpipe, loop, 1),
    "1f1b": (one_forward_one_backward, loop, 1),
    "interleaved-1f1b": (interleaved_1f1b, loop, None),
    "looped-bfs": (looped_bfs, loop, None),
    "interleaved-zero-bubble": (interleaved_zero_bubble, loop, None),
    "zb-h1": (interleaved_zero_bubble, loop, 1),
    "zb-v": (zb_v, vee, 2),
    "dualpipe-v": (dualpipe_v, vee, 2),
}


def generate(kind: str, ranks: int, micro_batches: int, virtual_stages: int | None = None) -> Schedule:
    """A schedule by its name.

    Args:
        kind: One of `KNOWN`.
        ranks: Pipeline ranks.
        micro_batches: Micro-batches of a step.
        virtual_stages: Stages per rank; None is 2 where the schedule has a choice, and what it has otherwise.

    Raises:
        ScheduleError: Every number that this schedule cannot have, with the nearest that work.
    """
    if kind not in KNOWN:
        raise ScheduleError(f"unknown schedule {kind!r}{nearest(kind, KNOWN)}: use {', '.join(KNOWN)}")
    make, placement, only = KNOWN[kind]
    v = virtual_stages if virtual_stages is not None else only or 2
    numbers = {"ranks": ranks, "virtual stages": v, "micro-batches": micro_batches}
    faults = [f"{number} {what}: at least 1 is needed" for what, number in numbers.items() if number < 1]
    if only is not None and v != only and v >= 1:
        faults.append(f"{v} virtual stages: {kind} has {only} per rank, use {only}")
    if not faults:
        faults = _misfits(kind, ranks, v, micro_batches)
    if faults:
        raise ScheduleError(f"there is no schedule {kind} with these numbers:", faults)
    return Schedule(kind, placement(ranks, v), micro_batches, make(ranks, v, micro_batches))


def evaluation(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """Forwards only, for any placement of stages: a rank's stages in order, each for all micro-batches.

    Nothing is kept for a backward, so breadth first costs no memory. For stages in a loop or in one V no order ends
    sooner.
    """
    rows = tuple(
        tuple(a for stage, owner in enumerate(placement) if owner == rank for a in _all(stage, "F", micro_batches))
        for rank in range(max(placement) + 1)
    )
    return Schedule("evaluation", placement, micro_batches, rows, training=False)


def _misfits(kind: str, p: int, v: int, m: int) -> list[str]:
    """Why micro-batches do not fit."""
    if kind == "dualpipe-v" and m < 2 * p:
        return [f"{m} micro-batches: dualpipe-v needs at least as many as it has stages, use {2 * p} or more"]
    if v > 1 and kind.startswith("interleaved") and m % (m // p or 1):
        lower = next(n for n in itertools.count(m - 1, -1) if n % (n // p or 1) == 0)
        upper = next(n for n in itertools.count(m + 1) if n % (n // p or 1) == 0)
        return [
            f"{m} micro-batches: with {p} ranks they go in {m // p} rounds, and {m} is not a multiple of {m // p}; "
            f"use {lower} or {upper}"
        ]
    return []


def _round(p: int, v: int, m: int) -> int:
    """Micro-batches that go through a stage before the rank's next stage has its turn."""
    return m // (m // p or 1) if v > 1 else m


def _all(stage: int, kind: str, m: int) -> Row:
    return tuple(Action(stage, kind, micro_batch) for micro_batch in range(m))


def _by_rounds(rank: int, p: int, v: int, m: int, size: int) -> tuple[Row, Row]:
    """Forwards and backwards of a rank: per round all its stages, upwards and downwards."""
    stages = range(rank, p * v, p)
    rounds = [range(first, first + size) for first in range(0, m, size)]
    forwards = tuple(Action(stage, "F", i) for each in rounds for stage in stages for i in each)
    backwards = tuple(Action(stage, "B", i) for each in rounds for stage in reversed(stages) for i in each)
    return forwards, backwards


def _alternate(forwards: Row, backwards: Row, warmup: int, late: int | None = None) -> Row:
    """Warm-up forwards, then a forward before each backward while there are any.

    late: for split backwards, how many steps a W comes after its I.
    """
    actions = list(forwards[:warmup])
    ahead = iter(forwards[warmup:])
    weights = deque[Action]()
    for backward in backwards:
        actions += itertools.islice(ahead, 1)
        actions.append(backward)
        if late is not None:
            weights.append(backward._replace(kind="W"))
            if len(weights) > late:
                actions.append(weights.popleft())
    return (*actions, *weights)


class _Line:
    """A row written as patterns: `F0` is the next forward of the stage on the way down, `F1` of the one on the way up,
    and a bare `W` finishes the oldest backward that was split."""

    def __init__(self, down: int, up: int) -> None:
        self.actions: list[Action] = []
        self._stages = (down, up)
        self._next = Counter[tuple[int, str]]()
        self._open = deque[Action]()

    def add(self, pattern: str, times: int) -> None:
        for word in pattern.split() * times:
            if word == "W":
                self.actions.append(self._open.popleft()._replace(kind="W"))
                continue
            stage, kind = self._stages[int(word[1])], word[0]
            counted = "I" if kind == "B" else kind  # whole and split backwards share one count
            action = Action(stage, kind, self._next[stage, counted])
            self._next[stage, counted] += 1
            self.actions.append(action)
            if kind == "I":
                self._open.append(action)
