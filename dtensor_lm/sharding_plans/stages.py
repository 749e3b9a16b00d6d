"""From `layers -> pp` and a schedule to the stages of a pipeline, or to everything that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dtensor_lm.chain import Chain, balance, layer_starts
from dtensor_lm.errors import ScheduleError
from dtensor_lm.layout import Layout
from dtensor_lm.mesh import Mesh
from dtensor_lm.region import Crossing
from dtensor_lm.schedules import checker
from dtensor_lm.schedules.library import evaluation, generate
from dtensor_lm.schedules.table import Schedule
from dtensor_lm.sharding_plans.checks import LAYERS
from dtensor_lm.sharding_plans.pipeline import Boundary, Link, Pipeline, Stage
from dtensor_lm.sharding_plans.plan import TABLES, Plan
from dtensor_lm.signatures import Value
from dtensor_lm.trace import Trace

Add = Callable[[str, str], None]  # (path, text) of a fault
LayoutOf = Callable[[Crossing, Value], Layout]  # a tensor as the model's own code has it


@dataclass(frozen=True)
class PipelineOptions:
    """What `resolve` is asked for a pipeline.

    schedule: a name of `dtensor_lm.schedules.KNOWN`, or a table; None is 1f1b, or interleaved-1f1b where stages per
    rank are asked for. split: layers of each stage; None balances their cost. accumulate: runs of the schedule in a
    step, between which the micro-batches are divided.
    """

    schedule: str | Schedule | None = None
    virtual_stages: int | None = None
    split: tuple[int, ...] | None = None
    accumulate: int = 1

    def said(self) -> list[str]:
        """The options that differ from their defaults."""
        return [name for name, value in vars(self).items() if value != getattr(PipelineOptions(), name)]


def pipeline_axis(plan: Plan, mesh: Mesh, add: Add) -> str:
    """The axis that the layers go over, '' if none does."""
    axes = [axis for axis in plan.axes("compute", LAYERS) if mesh[axis] > 1]
    if len(axes) > 1:
        add("", f"layers -> ({', '.join(axes)}): one axis is a pipeline's: layers -> {axes[0]}")
    if not axes:
        return ""
    for table in TABLES:
        for name, row in getattr(plan, table).items():
            if name != LAYERS and axes[0] in row:
                add(
                    "", f"{table}: {name} -> {axes[0]}: the layers go over this axis, and nothing else can: take it off"
                )
    return axes[0]


def default_micro_batches(schedule: str | Schedule | None, ranks: int, accumulate: int) -> int:
    """Micro-batches of a step where nobody says: one without a pipeline; else, for each run, as many as a user's own
    table has, or two for each pipeline rank, which every known schedule can have."""
    if isinstance(schedule, Schedule):
        return schedule.micro_batches * accumulate
    return 2 * ranks * accumulate if ranks > 1 else 1


def schedule_of(options: PipelineOptions, ranks: int, micro: int, add: Add) -> Schedule | None:
    """The table of one run; None with its faults added."""
    runs = options.accumulate
    if micro % runs:
        add("", f"{micro} micro-batches do not divide over accumulate={runs} runs of the schedule: "
                f"use {max(micro // runs, 1) * runs} or {(micro // runs + 1) * runs}")  # fmt: skip
        return None
    kind, v = options.schedule, options.virtual_stages
    if kind is None:
        kind = "1f1b" if v in (None, 1) else "interleaved-1f1b"
    try:
        made = generate(kind, ranks, micro // runs, v) if isinstance(kind, str) else kind
    except ScheduleError as error:
        for fault in error.faults or [error.title]:
            add("", f"schedule {kind}: {fault}" if error.faults else fault)
        return None
    wrong = [] if isinstance(kind, str) else _misfits(made, options, ranks, micro // runs)
    wrong = wrong or checker.faults(made)
    for fault in wrong:
        add("", f"schedule {made.name}: {fault}")
    return None if wrong else made


def _misfits(table: Schedule, options: PipelineOptions, ranks: int, micro: int) -> list[str]:
    """Why a table of one's own is for another mesh or batch."""
    faults = []
    if table.ranks != ranks:
        faults.append(f"its table has {table.ranks} ranks, the mesh's pipeline {ranks}")
    if table.micro_batches != micro:
        faults.append(f"its table has {table.micro_batches} micro-batches, a run of the schedule {micro}: "
                      f"use {table.micro_batches * options.accumulate} micro-batches")  # fmt: skip
    if options.virtual_stages is not None and table.virtual_stages != options.virtual_stages:
        faults.append(f"stages per rank are {table.virtual_stages} in its table, not {options.virtual_stages}")
    if not table.training:
        faults.append("its table has no backward: it is an evaluation")
    return faults


def make_pipeline(
    axis: str, schedule: Schedule, options: PipelineOptions, record: Trace, micro: int, layout: LayoutOf, add: Add
) -> Pipeline | None:
    """The stages of a model; None with the faults added."""
    chain = record.chain
    bounds = _bounds(chain, schedule.stages, options.split, add)
    if bounds is None:
        return None
    links = tuple(
        Link(
            link.unit,
            {name: layout(record.region(link.unit).inputs[name], value) for name, value in link.takes.items()},
            tuple(
                None if value is None else layout(crossing, value)
                for value, crossing in zip(link.gives, record.region(link.unit).outputs, strict=True)
            ),
            link.single,
            link.cost,
        )
        for link in chain.links
    )
    starts = set(layer_starts(chain))
    stages = tuple(
        Stage(
            i, schedule.placement[i], first, stop, len(starts & {*range(first, stop)}),
            sum(link.cost for link in links[first:stop]),
        )
        for i, (first, stop) in enumerate(pairwise(bounds))
    )  # fmt: skip
    boundaries = tuple(
        Boundary(
            stage.index - 1, name, links[stage.first].takes[name],
            schedule.placement[stage.index] != schedule.placement[stage.index - 1], micro,
        )
        for stage in stages[1:]
        for name in links[stage.first].takes
    )  # fmt: skip
    tables = evaluation(schedule.placement, schedule.micro_batches)
    homes = _homes(record, stages)
    return Pipeline(axis, schedule, tables, options.accumulate, links, stages, boundaries, homes)


def _bounds(chain: Chain, parts: int, split: Sequence[int] | None, add: Add) -> list[int] | None:
    """Numbers of the first link of each stage, and of the link after the last."""
    starts = layer_starts(chain)
    if len(starts) < parts:
        add("", f"{len(starts)} layer{'s' * (len(starts) != 1)} on {parts} stages: every stage needs a layer: use at "
                f"least {parts} layers, or fewer stages")  # fmt: skip
        return None
    if split is not None and (len(split) != parts or sum(split) != len(starts) or min(split) < 1):
        add("", f"split {','.join(map(str, split))}: {parts} numbers of at least 1 are needed, one for each stage, "
                f"which add up to the model's {len(starts)} layers")  # fmt: skip
        return None
    allowed = [i == 0 or start not in chain.barred for i, start in enumerate(starts)]
    ends = [*starts[1:], len(chain.links)]
    costs = [
        sum(link.cost for link in chain.links[start if i else 0 : end])
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    counts = list(split) if split is not None else balance(costs, allowed, parts)
    places = [0, *accumulate(counts or [])]
    bad = [starts[p] for p in places[1:-1] if not allowed[p]]
    if counts is None or bad:
        for start in bad or [start for start in starts[1:] if start in chain.barred]:
            add("", f"no stage can begin with {chain.links[start].unit}: {chain.barred[start]}: hand everything that "
                    "later layers need from layer to layer")  # fmt: skip
        return None
    return [0, *(starts[p] for p in places[1:-1]), len(chain.links)]


def _homes(record: Trace, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """parameter -> the stages that use it; of what is never used, the first stage."""
    found: dict[str, set[int]] = {name: set() for name in record.parameters}
    units: dict[str, set[int]] = {}
    for stage in stages:
        for link in record.chain.links[stage.first : stage.stop]:
            units.setdefault(link.unit, set()).add(stage.index)
    for use in record.uses:
        found[use.parameter] |= units.get(record.units[use.region], set())
    for name, gaps in record.chain.gaps.items():
        for gap in gaps:
            # What the model's own code does before a link, the stage of the link before it does.
            found[name] |= {s.index for s in stages if s.first <= max(gap - 1, 0) < s.stop}
    return {name: tuple(sorted(used)) or (0,) for name, used in found.items()}
