"""When each action of a table begins and ends, for given durations.

    timeline = simulate(generate("1f1b", ranks=4, micro_batches=8), Durations(forward=1, backward=2))
    timeline.bubble_fraction                       # 3 / 11

A rank does one action after another, each as early as its inputs are there. What comes from another rank arrives `send`
after its end; sending occupies no rank and no message delays another. Times are in any unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from dtensor_lm.errors import ScheduleError
from dtensor_lm.schedules.checker import check, in_order
from dtensor_lm.schedules.table import Action, Schedule


@dataclass(frozen=True)
class Durations:
    """What an action takes: one number for all stages, or one per stage. `send` is from rank to rank, for all.

    In torch's engine the first stage, which has no input gradient, does its whole backward in W and nothing in I.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    input_grad: float | Sequence[float] = 1.0
    weight_grad: float | Sequence[float] = 1.0
    send: float = 0.0

    def of(self, action: Action) -> float:
        value = {"F": self.forward, "B": self.backward, "I": self.input_grad, "W": self.weight_grad}[action.kind]
        return value[action.stage] if isinstance(value, Sequence) else value

    def faults(self, stages: int) -> list[str]:
        """Durations that no time can be told from."""
        found = []
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            values = value if isinstance(value, Sequence) else [value]
            if isinstance(value, Sequence) and len(value) != stages:
                found.append(f"{name} has {len(value)} durations: give one number, or one for each of {stages} stages")
            if not all(math.isfinite(each) and each >= 0 for each in values):
                found.append(f"{name} is {value}: durations are finite and not negative")
        return found


class Span(NamedTuple):
    """An action and its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of each rank, in order of time."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the begin of the first action to the end of the last, over all ranks."""
        return max(span.end for spans in self.spans for span in spans)

    @property
    def bubble_fraction(self) -> float:
        """The part of the time of all ranks in which they do nothing."""
        busy = math.fsum(span.end - span.start for spans in self.spans for span in spans)
        whole = self.makespan * len(self.spans)
        return 1 - busy / whole if whole else 0.0

    def idle(self, rank: int) -> float:
        """The time of a rank between its first and its last action in which it does nothing."""
        spans = self.spans[rank]
        return spans[-1].end - spans[0].start - math.fsum(span.end - span.start for span in spans)


def simulate(schedule: Schedule, durations: Durations | None = None) -> Timeline:
    """The timeline of a table; `ScheduleError` with every fault of the table, or of the durations."""
    durations = durations or Durations()
    check(schedule)
    if found := durations.faults(schedule.stages):
        raise ScheduleError("these durations cannot be used:", found)
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.rows]
    order, _ = in_order(schedule)
    for rank, action in order:
        start = spans[rank][-1].end if spans[rank] else 0.0
        for need in schedule.needs(action):
            away = schedule.placement[need.stage] != rank
            start = max(start, ends[need] + (durations.send if away else 0.0))
        ends[action] = start + durations.of(action)
        spans[rank].append(Span(action, start, ends[action]))
    return Timeline(schedule, tuple(map(tuple, spans)))
