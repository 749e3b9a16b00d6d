"""Hypothesis strategies: small models, meshes, every kind of plan that a model's signatures allow, batches with labels
masked in every pattern, as `Case`s that print the command which runs them again.

    @given(case=cases(models()))
    def test_every_plan(case):
        report = run(case)
        assert report.ok, case.command()

For a model of your own: `cases(st.just(("my_package.model:build", {"embed": 16})))`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from dtensor_lm.errors import PlanError, ScheduleError
from dtensor_lm.mesh import Mesh
from dtensor_lm.schedules import KNOWN, generate
from dtensor_lm.sharding_plans.library import standard
from dtensor_lm.sharding_plans.plan import Plan
from dtensor_lm.signatures import names_of
from dtensor_lm.testing.case import LABELS, Case
from dtensor_lm.trace import Trace, trace

Choice = tuple[str, Mapping[str, Any]]  # a model and its changes, as a `Case` has them
AXES = ("a", "b", "c")
SEQUENCES = (24, 8, 12)  # that meshes of up to 8 ranks divide in many ways


@st.composite
def models(draw: st.DrawFn) -> Choice:
    """Small shapes of the registered families, with every switch."""
    name = draw(st.sampled_from(["tiny", "tiny-gpt"]))
    heads = draw(st.sampled_from([4, 6, 8]))
    changes: dict[str, Any] = {
        "vocab": draw(st.sampled_from([24, 16])),
        "embed": heads * 2 * draw(st.sampled_from([1, 2])),
        "layers": draw(st.integers(1, 2)),
        "heads": heads,
        "ffn": draw(st.sampled_from([24, 16])),
        "seq": max(SEQUENCES),
        "tied": draw(st.booleans()),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "z_loss": draw(st.sampled_from([0.0, 0.01])),
    }
    if name == "tiny":
        changes["kv_heads"] = draw(st.sampled_from([n for n in (heads, heads // 2, 1) if n]))
    else:
        changes["dropout"] = draw(st.sampled_from([0.0, 0.2]))
        changes["attention_dropout"] = draw(st.sampled_from([0.0, 0.2]))
    return name, changes


@st.composite
def meshes(draw: st.DrawFn, most: int = 8, least: int = 1) -> Mesh:
    """Up to three axes of 2, 3, 4, 6 or 8, mostly of 2: wide groups are slow on a CPU and prove no more."""
    shapes = [s for s in _SHAPES if least <= math.prod(s) <= most]
    return Mesh(**dict(zip(AXES, draw(st.sampled_from(shapes)), strict=False)))


_SHAPES = [(), *[(2,)] * 6, (3,), (4,), *[(2, 2)] * 3, (6,), (2, 3), (3, 2), (8,), (2, 4), (4, 2), *[(2, 2, 2)] * 5]


@functools.lru_cache(maxsize=32)
def _trace(model: str, changes: str, seq: int) -> Trace:
    return trace(Case(model, json.loads(changes)).build(), {"batch": 1, "seq": seq})


Rows = dict[str, list[str]]  # one table of a plan


@st.composite
def plans(draw: st.DrawFn, record: Trace, mesh: Mesh, whole_gradients: bool = False) -> Plan:
    """A plan that the signatures allow. Every axis of the mesh does something.

    whole_gradients: they are cut no further than what regions compute with.
    """
    compute = draw(_compute(record, mesh))
    dims = [[dim[0] for dim in use.spec.dims] for use in record.uses]
    stored = sorted({name for use in dims for name in use if name != "_"})
    own = {name: axes for name, axes in compute.items() if name in stored}
    storage = draw(_further(own, dims, mesh))
    # One of storage and gradients begins with the other, and the optimizer with both.
    whole = whole_gradients or draw(st.integers(0, 3)) == 0
    # The table says each name that storage cuts, or storage's row would stand for it.
    gradients = {**{name: [] for name in storage}, **own} if whole else draw(_further(storage, dims, mesh))
    optimizer = draw(_further(storage if whole else gradients, dims, mesh))
    used = {axis for rows in (compute, storage, gradients, optimizer) for axes in rows.values() for axis in axes}
    idle = [axis for axis in mesh.active if axis not in used]
    compute = {**compute, "batch": [*compute.get("batch", []), *idle]}
    return Plan(compute, storage, gradients, optimizer, regather=draw(st.booleans()))  # type: ignore[arg-type]


@st.composite
def _compute(draw: st.DrawFn, record: Trace, mesh: Mesh) -> Rows:
    """On each axis a set of names that is one lawful cut in every region where one of them stands."""
    regions = [
        (record.region(path).cuts, every) for path, (_, every) in names_of(record.regions, record.parents).items()
    ]
    cuts = sorted({tuple(sorted(cut)) for allowed, _ in regions for cut in allowed})
    sizes = sizes_of(record)
    compute: Rows = {}
    for axis in draw(st.permutations(mesh.active)):
        chosen: frozenset[str] = frozenset()
        most = draw(st.sampled_from([1, 0, 2, 4, 99]))
        for cut in draw(st.permutations(cuts)) if most else []:
            wider = chosen | frozenset(cut)
            lawful = all(not (wider & every) or (wider & every) in allowed for allowed, every in regions)
            parts = {name: mesh[axis] * mesh.product(compute.get(name, ())) for name in cut}
            if len(chosen) < most and lawful and all(n == "batch" or sizes[n] % parts[n] == 0 for n in cut):
                chosen = wider
        for name in sorted(chosen):
            compute.setdefault(name, []).append(axis)
    return compute


@st.composite
def _further(draw: st.DrawFn, rows: Rows, dims: list[list[str]], mesh: Mesh) -> Rows:
    """These rows, with some axes put on the inner end of dims of parameters that they don't cut yet."""
    stored = sorted({name for use in dims for name in use if name != "_"})
    rows = {name: [*axes] for name, axes in rows.items()}
    for axis in mesh.active:
        name = draw(st.sampled_from([None, "embed", *stored]))
        free = not any(name in use and any(axis in rows.get(n, ()) for n in use) for use in dims)
        if name in stored and free:
            rows.setdefault(name, []).append(axis)
    return rows


def sizes_of(record: Trace) -> dict[str, int]:
    """Of every name the number that every tensor's size is a multiple of."""
    sizes: dict[str, int] = {}
    for found in record.sizes.values():
        for name, size in found.items():
            sizes[name] = math.gcd(sizes.get(name, 0), size)
    return sizes


@st.composite
def usual(draw: st.DrawFn, record: Trace, mesh: Mesh, whole_gradients: bool = False) -> tuple[Plan, Mesh]:
    """The standard plan, with ZeRO and sequence parallelism as options, and the mesh with its axes' usual names."""
    zero = draw(st.sampled_from([0, 1, 3] if whole_gradients else [0, 1, 2, 3]))
    plan = standard(zero, draw(st.booleans()), whole_gradients)
    cut = math.gcd(*(size for name, size in sizes_of(record).items() if plan.axes("compute", name) == ("tp",)))
    orders = [dict(zip(names, mesh.sizes.values(), strict=False)) for names in itertools.permutations(_USUAL)]
    fitting = [sizes for sizes in orders if cut % sizes.get("tp", 1) == 0]
    assume(fitting)
    return plan, Mesh(**draw(st.sampled_from(fitting)))


_USUAL = ("dp", "fsdp", "tp")


@dataclass(frozen=True)
class Pipe:
    """A pipeline over an axis of a mesh; without an axis, none."""

    axis: str = ""
    schedule: str = ""
    virtual_stages: int = 0
    micro_batches: int = 1
    accumulate: int = 1
    stages: int = 1
    splits: bool = False


@st.composite
def pipes(draw: st.DrawFn, mesh: Mesh) -> Pipe:
    """A pipeline of up to 4 ranks and 8 stages that its schedule allows."""
    axes = [axis for axis in mesh.active if mesh[axis] <= 4]
    assume(axes)
    axis, schedule = draw(st.sampled_from(axes)), draw(st.sampled_from(sorted(KNOWN)))
    ranks, only = mesh[axis], KNOWN[schedule][2]
    virtual = only or draw(st.integers(1, 3 if ranks == 2 else 2))
    accumulate = draw(st.sampled_from([1, 1, 1, 2]))
    try:
        table = generate(schedule, ranks, draw(st.integers(1, 2 * ranks + 1)), virtual)
    except ScheduleError:
        table = generate(schedule, ranks, 2 * ranks, virtual)
    splits = any(action.kind in "IW" for row in table.rows for action in row)
    return Pipe(axis, schedule, virtual, table.micro_batches * accumulate, accumulate, table.stages, splits)


@st.composite
def cases(
    draw: st.DrawFn,
    models: st.SearchStrategy[Choice],
    *,
    most: int = 8,
    least: int = 1,
    steps: st.SearchStrategy[int] | None = None,
    dtypes: st.SearchStrategy[str] | None = None,
) -> Case:
    """A comparison of up to `most` ranks that resolves."""
    model, changes = draw(models)
    mesh = draw(meshes(most, least))
    seq = draw(st.sampled_from(SEQUENCES))
    record = _trace(model, json.dumps(dict(changes)), seq)
    micro, pipe = draw(st.sampled_from([1, 1, 2, 3])), Pipe()
    if "layers" in changes and mesh.active and draw(st.integers(0, 2)) == 0:
        pipe = draw(pipes(mesh))
        micro = pipe.micro_batches
        changes = {**changes, "layers": pipe.stages + draw(st.integers(0, 2))}
    inside = Mesh(**{axis: size for axis, size in mesh.sizes.items() if axis != pipe.axis})
    if draw(st.booleans()):
        plan = draw(plans(record, inside, pipe.splits))
    else:
        plan, inside = draw(usual(record, inside, pipe.splits))
    if pipe.axis:
        plan = replace(plan, compute={**plan.compute, "layers": pipe.axis})
        sizes = [*inside.sizes.items()]
        sizes.insert(draw(st.integers(0, len(sizes))), (pipe.axis, mesh[pipe.axis]))
        inside = Mesh(**dict(sizes))
    mesh = inside
    rows = draw(st.integers(1, 2))
    case = Case(
        model,
        changes,
        str(mesh),
        plan.as_dict(),
        batch=mesh.product(plan.axes("compute", "batch")) * micro * rows,
        seq=seq,
        micro_batches=micro,
        labels=draw(st.sampled_from(LABELS)),
        dtype=draw(dtypes) if dtypes is not None else "float64",
        steps=draw(steps) if steps is not None else 0,
        seed=draw(st.integers(0, 99)),
        schedule=pipe.schedule,
        virtual_stages=pipe.virtual_stages,
        accumulate=pipe.accumulate,
    )
    try:
        program = case.program()
    except PlanError:
        assume(False)
    return replace(case, mesh=str(program.mesh))


def roles(case: Case) -> str:
    """What the axes of a case do, such as `data+zero3 x tensor+sequence`: to see what was drawn."""
    mesh, plan = Mesh.parse(case.mesh), Plan.from_dict(case.plan)
    return " x ".join(sorted(_role(plan, axis) for axis in mesh.active)) or "one device"


_ROLES = {"batch": "data", "seq": "context", "res": "sequence", "q_seq": "context", "expert": "expert"}


def _role(plan: Plan, axis: str) -> str:
    if axis in plan.axes("compute", "layers"):
        return "pipeline"
    found = {_ROLES.get(n, "tensor") for n in plan.names if axis in plan.axes("compute", n)}
    found -= {"sequence"} if "context" in found else set()
    levels = {"storage": "zero3", "gradients": "zero2", "optimizer": "zero1"}
    for table, level in levels.items():
        if any(axis in plan.axes(table, n) and axis not in plan.axes("compute", n) for n in plan.names):
            found.add(level)
            break
    return "+".join(sorted(found)) or "copies"
