"""All known schedules side by side: bubble and memory for several numbers of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dtensor_lm.errors import ScheduleError
from dtensor_lm.schedules.checker import peaks
from dtensor_lm.schedules.library import KNOWN, generate
from dtensor_lm.schedules.simulator import Durations, simulate


@dataclass(frozen=True)
class Comparison:
    """One schedule with its numbers.

    bubble_fraction: of the time of all ranks, idle. held: the most micro-batches whose activations one rank holds at
    once, where 1 is one micro-batch in all layers of a rank.
    """

    kind: str
    ranks: int
    micro_batches: int
    bubble_fraction: float
    held: float


def compare(ranks: Sequence[int] = (4, 8, 16), per_rank: Sequence[int] = (1, 2, 4)) -> Iterator[Comparison]:
    """Every known schedule with m = per_rank * p micro-batches on p ranks, where it exists.

    A forward, an input gradient and a weight gradient of a rank's layers take 1 each, divided by its number of stages;
    sends take nothing.
    """
    for kind in KNOWN:
        for p in ranks:
            for m in (factor * p for factor in per_rank):
                try:
                    table = generate(kind, p, m)
                except ScheduleError:
                    continue
                v = table.virtual_stages
                timeline = simulate(table, Durations(1 / v, 2 / v, 1 / v, 1 / v))
                held = max(peak.held for peak in peaks(table)) / v
                yield Comparison(kind, p, m, timeline.bubble_fraction, held)


def table_text(lines: Iterable[Comparison]) -> str:
    """A table with a line for each schedule and a column for each (ranks, micro-batches): bubble and what is held."""
    found = {(each.kind, each.ranks, each.micro_batches): each for each in lines}
    columns = sorted({key[1:] for key in found})
    kinds = list(dict.fromkeys(key[0] for key in found))
    first = max(map(len, kinds))
    out = [
        f"{'ranks':<{first}}" + "".join(f"{p:>6}     " for p, _ in columns),
        f"{'micro-batches':<{first}}" + "".join(f"{m:>6}     " for _, m in columns),
        " " * first + "".join(f"{'idle':>6} held" for _ in columns),
    ]
    for kind in kinds:
        cells = []
        for column in columns:
            each = found.get((kind, *column))
            cells.append(f"{each.bubble_fraction:>6.1%} {each.held:<4.3g}" if each else f"{'-':>6}     ")
        out.append(f"{kind:<{first}}" + "".join(cells))
    return "\n".join(line.rstrip() for line in out)
