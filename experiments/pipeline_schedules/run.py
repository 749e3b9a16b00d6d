"""All schedules twice: as the simulator says, and as real processes run them.

    python experiments/pipeline_schedules/run.py [--milliseconds 40] [--most 3]

Simulated: time lost and activations kept on 4, 8 and 16 ranks, beside the closed forms. Measured: the model of
`tests/sleeping.py`, whose layers sleep, trained by `dtensor_lm.train_step` on 2 and 4 gloo processes; sleeping needs no
core, so two cores are enough. Writes results.json and results.md beside itself. Ends with exit code 1 where a closed
form, an order of actions, a number of kept activations, or the order of two schedules that differ clearly is not what
the simulator says.

A step sleeps at least as long as the simulated time, so no step is faster. Each schedule is repeated until a step is
within 3 % of that, at most `most` times; the fastest step counts. Where the system allows it (on Linux, root), the
processes go before others that want the same cores: otherwise their load is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dtensor_lm.errors import ScheduleError
from dtensor_lm.schedules import KNOWN, Durations, Schedule, generate, peaks, simulate
from dtensor_lm.schedules.comparison import compare
from dtensor_lm.testing.workers import pool

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent.parent))  # where workers find it too
from tests.sleeping import Event, Seconds, Step, expected, steps  # noqa: E402

LAYERS = 2  # per rank, whatever the number of its stages
ENOUGH = 1.03  # of the simulated time: a step so fast is not repeated
CLEAR = 0.03  # two schedules whose simulated times differ by more of them must be in the same order when measured

Row = dict[str, Any]


# Simulated


def closed_bubble(kind: str, p: int, m: int, v: int) -> float | None:
    """The bubble in the papers, F, I and W equally long; None where they give none for so few micro-batches."""
    if kind in ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"):  # arXiv:1811.06965, 2104.04473
        return (p - 1) / (v * m + p - 1) if m % p == 0 else None
    return (p - 1) / (3 * v * m + p - 1) if m >= 2 * p else None  # arXiv:2401.10241, 2405.15362


def closed_held(kind: str, p: int, m: int, v: int) -> float:
    """The most micro-batches that a rank keeps, for m a multiple of p: of all its layers."""
    if kind == "interleaved-1f1b":  # the warm-up of rank 0, and one more
        return min(m, ((v - 1) * p + 2 * (p - 1) + 1) / v)
    if kind == "dualpipe-v":
        return p + 0.5
    return m if kind in ("gpipe", "looped-bfs") else p


def simulated() -> list[Row]:
    """Every schedule on 4, 8 and 16 ranks with p, 2p and 4p micro-batches; why, where there is none."""
    found = {(each.kind, each.ranks, each.micro_batches): each for each in compare()}
    rows = []
    for kind, p, factor in itertools.product(KNOWN, (4, 8, 16), (1, 2, 4)):
        m, v = factor * p, KNOWN[kind][2] or 2
        row: Row = {"schedule": kind, "ranks": p, "micro_batches": m}
        if each := found.get((kind, p, m)):
            row |= {"bubble": each.bubble_fraction, "closed_bubble": closed_bubble(kind, p, m, v)}
            row |= {"held": each.held, "closed_held": closed_held(kind, p, m, v)}
        else:
            row["refused"] = refusal(kind, p, m)
        rows.append(row)
    return rows


def refusal(kind: str, p: int, m: int) -> str:
    try:
        generate(kind, p, m)
    except ScheduleError as error:
        return "; ".join(error.faults)
    return ""


def wrong_forms(rows: Sequence[Row]) -> list[str]:
    """Simulated numbers that differ from their closed forms."""
    return [
        f"{row['schedule']} p={row['ranks']} m={row['micro_batches']}: {what} {row[what]}, closed form {form}"
        for row in rows
        for what in ("bubble", "held")
        if (form := row.get(f"closed_{what}")) is not None and not math.isclose(row[what], form, abs_tol=1e-9)
    ]


# Measured


def wake_first() -> bool:
    """Lets all threads of this process run as soon as they want to; returns whether the system allowed it.

    They sleep nearly all of the time, so others lose little.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):
        return False
    return True


def durations(table: Schedule, seconds: Seconds, layers: int) -> Durations:
    """What the stages sleep. The first stage does nothing in I and its whole backward in W, as torch's engine does."""
    forward, first, second = (layers * each for each in seconds)
    others = table.stages - 1
    return Durations(forward, first + second, [0.0] + [first] * others, [first + second] + [second] * others)


def measure(kind: str, p: int, m: int, seconds: Seconds, most: int) -> Row:
    """One schedule on p processes."""
    table = generate(kind, p, m)
    layers = LAYERS // table.virtual_stages
    split = [layers] * table.stages
    timeline = simulate(table, durations(table, seconds, layers))
    first = all(pool(p).run(wake_first))
    runs: list[list[Step]] = pool(p).run(
        steps, kind, p, m, split, seconds, most, timeline.makespan * ENOUGH, timeout=600
    )
    every = [[of_rank[i] for of_rank in runs] for i in range(len(runs[0]))]
    times = [max(step.end for step in each) - min(step.start for step in each) for each in every]
    best = every[times.index(min(times))]
    slept = slept_durations(table, [e for step in best for e in step.events], layers)
    held = [max(event.alive for event in step.events) / layers for step in best]
    busy = m * LAYERS * sum(seconds)  # of each rank
    return {
        "schedule": kind,
        "ranks": p,
        "micro_batches": m,
        "simulated_seconds": timeline.makespan,
        "measured_seconds": min(times),
        "all_steps_seconds": times,
        "ratio": min(times) / timeline.makespan,
        "simulated_with_measured_sleeps_seconds": simulate(table, slept).makespan,
        "simulated_bubble": timeline.bubble_fraction,
        "measured_bubble": 1 - busy / min(times),
        "simulated_held": [peak.held for peak in peaks(table)],
        "measured_held": held,
        "before_other_processes": first,
        "order_as_table": all(
            [event[:3] for event in step.events] == expected(table, rank, split)
            for each in every
            for rank, step in enumerate(each)
        ),
    }


def slept_durations(table: Schedule, events: Sequence[Event], layers: int) -> Durations:
    """The mean of what the sleeps of each stage really took in a step."""
    total: dict[tuple[int, str], float] = {}
    for event in events:
        key = (event.layer // layers, event.kind)
        total[key] = total.get(key, 0.0) + (event.end - event.start) / table.micro_batches
    forward, first, second = ([total[stage, kind] for stage in range(table.stages)] for kind in "FIW")
    whole = [a + b for a, b in zip(first, second, strict=True)]
    return Durations(forward, whole, [0.0, *first[1:]], [whole[0], *second[1:]])


def disagreements(rows: Sequence[Row]) -> list[str]:
    """Pairs of schedules on equal ranks and micro-batches that the simulator and the clock order differently."""
    found = []
    for a, b in itertools.combinations(rows, 2):
        if any(a[key] != b[key] for key in ("ranks", "micro_batches")):
            continue
        fast, slow = sorted((a, b), key=lambda row: row["simulated_seconds"])
        apart = 1 - fast["simulated_seconds"] / slow["simulated_seconds"]
        if apart > CLEAR and fast["measured_seconds"] >= slow["measured_seconds"]:
            found.append(f"p={a['ranks']} m={a['micro_batches']}: {fast['schedule']} is not faster than "
                         f"{slow['schedule']}, which is simulated {apart:.1%} slower")  # fmt: skip
    return found


def wrong_runs(rows: Sequence[Row]) -> list[str]:
    """Runs that did another thing than their table."""
    names = [f"{row['schedule']} p={row['ranks']} m={row['micro_batches']}" for row in rows]
    found = [f"{name}: another order of actions" for name, row in zip(names, rows, strict=True)
             if not row["order_as_table"]]  # fmt: skip
    return found + [
        f"{name}: kept {row['measured_held']}, the table says {row['simulated_held']}"
        for name, row in zip(names, rows, strict=True)
        if row["measured_held"] != row["simulated_held"]
    ]


# Written


def simulated_text(rows: Sequence[Row]) -> list[str]:
    columns = sorted({(row["ranks"], row["micro_batches"]) for row in rows})
    found = {(row["schedule"], row["ranks"], row["micro_batches"]): row for row in rows}
    lines = [
        "| schedule | " + " | ".join(f"p={p} m={m}" for p, m in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    notes = []
    for kind in KNOWN:
        cells = []
        for column in columns:
            row = found[(kind, *column)]
            if "refused" in row:
                notes.append(f"{kind}, p={column[0]}, m={column[1]} is refused: {row['refused']}.")
                cells.append(f"refused: {column[1]} micro-batches are too few")
                continue
            form = row["closed_bubble"]
            closed = "none" if form is None else f"{form:.1%}"
            cells.append(f"{row['bubble']:.1%} ({closed}), {row['held']:.3g} ({row['closed_held']:.3g})")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return [*lines, "", *notes]


def measured_text(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| p | m | schedule | simulated s | measured s | ratio | with measured sleeps | bubble simulated | measured "
        "| held, by rank: simulated | measured | place simulated | measured |",
        "|---" * 13 + "|",
    ]
    for _, group in itertools.groupby(rows, key=lambda row: (row["ranks"], row["micro_batches"])):
        of_one = sorted(group, key=lambda row: (round(row["simulated_seconds"], 6), row["measured_seconds"]))
        for row in of_one:
            places = [1 + sum(other[f"{what}_seconds"] < row[f"{what}_seconds"] - 1e-9 for other in of_one)
                      for what in ("simulated", "measured")]  # fmt: skip
            held = [" ".join(f"{each:g}" for each in row[f"{what}_held"]) for what in ("simulated", "measured")]
            inner = row["measured_seconds"] / row["simulated_with_measured_sleeps_seconds"]
            lines.append(
                f"| {row['ranks']} | {row['micro_batches']} | {row['schedule']} | {row['simulated_seconds']:.3f} | "
                f"{row['measured_seconds']:.3f} | {row['ratio']:.3f} | {inner:.3f} | {row['simulated_bubble']:.1%} | "
                f"{row['measured_bubble']:.1%} | {held[0]} | {held[1]} | {places[0]} | {places[1]} |"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=40.0, help="of a layer's F, I and W")
    parser.add_argument("--most", type=int, default=3, help="steps of each schedule")
    given = parser.parse_args()
    began = time.monotonic()
    seconds = Seconds(*[given.milliseconds / 1000] * 3)
    paper = simulated()
    runs = []
    for p, factor, kind in itertools.product((2, 4), (2, 4), KNOWN):
        row = measure(kind, p, factor * p, seconds, given.most)
        runs.append(row)
        times = f"simulated {row['simulated_seconds']:.3f} s, measured {row['measured_seconds']:.3f} s"
        print(f"p={p} m={factor * p:2} {kind:24} {times}, steps: {len(row['all_steps_seconds'])}", flush=True)
    faults = [*wrong_forms(paper), *wrong_runs(runs), *disagreements(runs)]
    ratios = sorted(row["ratio"] for row in runs)
    where = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end, Python {platform.python_version()}, "
    where += f"torch {torch.__version__}, {time.monotonic() - began:.0f} seconds in all"
    verdict = [
        f"Measured by simulated time: {ratios[0]:.3f} to {ratios[-1]:.3f}, median {ratios[len(ratios) // 2]:.3f}.",
        f"What does not agree: {'; '.join(faults) or 'nothing'}.",
    ]
    held = "Held: pairs of a stage and a micro-batch."
    if all(row["before_other_processes"] for row in runs):
        held += " The processes were allowed to go before others."
    record = {"command": " ".join(["python experiments/pipeline_schedules/run.py", *sys.argv[1:]]), "machine": where,
              "seconds": seconds._asdict(), "simulated": paper, "measured": runs, "disagree": faults}  # fmt: skip
    (HERE / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    text = [
        "# Results", "", f"`{record['command']}`: {where}.", "", *verdict, "",
        "## Simulated", "", "Bubble (closed form), most micro-batches that a rank keeps (closed form).", "",
        *simulated_text(paper), "",
        "## Measured", "", f"{LAYERS} layers per rank; each sleeps {given.milliseconds:g} ms for F, I and W.", held, "",
        *measured_text(runs),
    ]  # fmt: skip
    (HERE / "results.md").write_text("\n".join(text) + "\n")
    print(*verdict, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
