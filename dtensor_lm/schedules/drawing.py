"""A timeline as text: a line for each stage of each rank, time from left to right.

    rank 0 |F0 F1 F2 F3 ......B0--- ...
    rank 1 |...F0 F1 F2 ...B0--- F3 B1---

A letter and a number are the begin of an action, dashes its length, dots are time in which the rank does nothing. It
can all be read without colours. What is too long for the width goes on below, from where no name is cut in two.
"""

from __future__ import annotations

import math
import textwrap
from itertools import pairwise

from dtensor_lm.schedules.checker import peaks
from dtensor_lm.schedules.simulator import Timeline

WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_COLOURS = {"F": "\x1b[30;44m", "B": "\x1b[30;42m", "I": "\x1b[30;46m", "W": "\x1b[30;43m"}  # black on a background
_RESET = "\x1b[0m"
_WIDEST, _LONGEST = 60, 100_000  # columns of an action, and of all, where others are so short that names do not fit


def draw(timeline: Timeline, width: int = 120, colour: bool = False) -> str:
    """The drawing of a timeline, at most `width` columns wide; `colour` adds ANSI codes and changes nothing else."""
    schedule = timeline.schedule
    names = [
        (rank, f"rank {rank} stage {stage}" if schedule.virtual_stages > 1 else f"rank {rank}", stage)
        for rank in range(schedule.ranks)
        for stage in schedule.stages_of(rank)
    ]
    margin = max(len(name) for _, name, _ in names) + 2
    scale = _columns_per_time(timeline)
    total = round(timeline.makespan * scale)
    lines = [(f"{name:<{margin - 1}}|", _line(timeline, rank, stage, scale, total)) for rank, name, stage in names]
    blocks = []
    for first, last in pairwise(_breaks(timeline, scale, total, max(width - margin, 20))):
        part = [f"{'time':<{margin}}{_ruler(scale, first, last - first)}".rstrip()]
        part += [head + _paint(cells[first:last], colour) for head, cells in lines]
        blocks.append("\n".join(part))
    title = textwrap.fill(summary(timeline), width, break_long_words=False)
    return "\n\n".join([title, *blocks, _legend(timeline, colour)])


def summary(timeline: Timeline) -> str:
    """One line of a drawing, in words and numbers."""
    schedule = timeline.schedule
    parts = [
        f"{schedule.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.micro_batches} micro-batches",
        f"time {timeline.makespan:.4g}",
        f"idle {timeline.bubble_fraction:.1%}",
    ]
    if schedule.training:
        held = [peak.held for peak in peaks(schedule)]
        parts.append(f"activations held at most {max(held)} (per rank: {' '.join(map(str, held))})")
    return "; ".join(parts)


def tick(distance: float) -> float:
    """The shortest round time that is at least `distance`."""
    power = 10 ** math.floor(math.log10(distance))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= distance * (1 - 1e-9))


def ticks(start: float, end: float, distance: float) -> list[float]:
    """Round times from start to end, at least `distance` apart and few digits long."""
    step = tick(distance)
    return [i * step for i in range(math.ceil(start / step), int(end / step * (1 + 1e-9)) + 1)]


def _columns_per_time(timeline: Timeline) -> float:
    """So many that each action has room for its name and a blank, if none then gets too long."""
    spans = [span for each in timeline.spans for span in each if span.end > span.start]
    longest = max((span.end - span.start for span in spans), default=1.0)
    for room in (1, 2):  # where times fall between columns, rounding may take one away
        wanted = [(len(_name(span.action)) + room) / (span.end - span.start) for span in spans]
        scale = min(max(wanted, default=1.0), _WIDEST / longest, _LONGEST / (timeline.makespan or 1.0))
        if all(abs(span.end * scale - round(span.end * scale)) < 1e-6 for span in spans):
            break
    return scale


def _name(action: tuple[int, str, int]) -> str:
    return f"{action[1]}{action[2]}"


Cell = tuple[str, str]  # a character, and the kind of its action or ""


def _line(timeline: Timeline, rank: int, stage: int, scale: float, total: int) -> list[Cell]:
    """What a stage does; blank where its rank does something for another stage."""
    cells: list[Cell] = [(".", "")] * total
    for action, start, end in timeline.spans[rank]:
        first, last = round(start * scale), round(end * scale)
        length = last - first
        if action.stage != stage:
            cells[first:last] = [(" ", "")] * length
            continue
        body = _name(action)[:length].ljust(length - 1, "-")[:length].ljust(length)
        cells[first:last] = [(character, action.kind if character != " " else "") for character in body]
    return cells


def _paint(cells: list[Cell], colour: bool) -> str:
    text = ""
    before = ""
    for character, kind in cells:
        if colour and kind != before:
            text += (_RESET if before else "") + _COLOURS.get(kind, "")
        before = kind
        text += character
    return text.rstrip() + (_RESET if colour and before else "")


def _breaks(timeline: Timeline, scale: float, total: int, most: int) -> list[int]:
    """The columns where blocks of at most `most` columns begin, and the end: if possible where no name is cut."""
    inside: set[int] = set()
    for action, start, end in (span for spans in timeline.spans for span in spans):
        first = round(start * scale)
        inside.update(range(first + 1, first + min(len(_name(action)), round(end * scale) - first)))
    found = [0]
    while total - found[-1] > most:
        latest = found[-1] + most
        found.append(next((column for column in range(latest, latest - most // 2, -1) if column not in inside), latest))
    return [*found, total]


def _ruler(scale: float, first: int, length: int) -> str:
    """Times above one block, each where it is."""
    text = ""
    for time in ticks(first / scale, (first + length) / scale, 10 / scale):
        column = round(time * scale) - first
        if column >= len(text) and column + len(f"{time:g}") <= length:
            text = text.ljust(column) + f"{time:g}"
    return text


def _legend(timeline: Timeline, colour: bool) -> str:
    kinds = {action.kind for actions in timeline.schedule.rows for action in actions}
    parts = [f"{_paint([(kind, kind)], colour)} {word}" for kind, word in WORDS.items() if kind in kinds]
    return "  ".join([*parts, ". idle"]) + "\nnumbers are micro-batches"
