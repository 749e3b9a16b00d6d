"""From a model, a plan and a mesh to a Program, or to one PlanError with every fault."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dtensor_lm.edges import Collective, UnsupportedEdge, edge_steps
from dtensor_lm.errors import ModelError, nearest
from dtensor_lm.layout import ITEMSIZE, Dim, Layout
from dtensor_lm.mesh import Mesh
from dtensor_lm.region import TensorSpec
from dtensor_lm.schedules.table import Schedule
from dtensor_lm.sharding_plans.checks import LAYERS, Checks
from dtensor_lm.sharding_plans.halves import faults_of_halves
from dtensor_lm.sharding_plans.parts import complete
from dtensor_lm.sharding_plans.pipeline import Pipeline
from dtensor_lm.sharding_plans.plan import Plan
from dtensor_lm.sharding_plans.program import Edge, Gather, Parameter, Program, RegionPlan, hops
from dtensor_lm.sharding_plans.stages import (
    PipelineOptions,
    default_micro_batches,
    make_pipeline,
    pipeline_axis,
    schedule_of,
)
from dtensor_lm.signatures import Value, names_of
from dtensor_lm.trace import Call, Trace, trace


def resolve(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    batch: int | None = None,
    seq: int | None = None,
    micro_batches: int | None = None,
    dtype: str | None = None,
    decay: str = "matrices",
    schedule: str | Schedule | None = None,
    virtual_stages: int | None = None,
    split: Sequence[int] | None = None,
    accumulate: int = 1,
) -> Program:
    """Derives every layout and every collective of a training step. Needs no process group and no memory.

    model: on the meta device, a region itself. batch: sequences per step over all ranks and micro-batches (default:
    one per data rank and micro-batch); seq: tokens per sequence (default: the model's `config.seq`); dtype: of
    parameters and compute (default: the model's); decay: which parameters decay, `matrices` or `all`.
    micro_batches: of a step (default: 1; in a pipeline, two for each of its ranks and each run of the schedule).

    Where the plan sends `layers` to an axis of the mesh: schedule: a name of `dtensor_lm.schedules.KNOWN` or a table
    (default: 1f1b); virtual_stages: stages per rank; split: layers of each stage (default: balanced by cost);
    accumulate: runs of the schedule in a step.

    Raises `PlanError` with every fault of the plan, `ModelError` with every contradiction of the signatures.
    """
    kinds = ((plan, Plan, "dtensor_lm.plans.standard()"), (mesh, Mesh, "dtensor_lm.Mesh(fsdp=2, tp=2)"))
    if wrong := [f"{value!r} is no {kind.__name__}: give one, such as {such}" for value, kind, such in kinds
                 if not isinstance(value, kind)]:  # fmt: skip
        raise ModelError("resolve cannot use these arguments:", wrong)
    faults = [
        f"{name} is {value!r}: a whole number of at least 1"
        for name, value in (("batch", batch), ("seq", seq), ("micro_batches", micro_batches),
                            ("virtual_stages", virtual_stages), ("accumulate", accumulate))
        if value is not None and (not isinstance(value, int) or value < 1)
    ]  # fmt: skip
    if split is not None and not all(isinstance(n, int) for n in split):
        faults.append(f"split is {split!r}: the number of layers of each stage, such as [4, 3]")
    if dtype is not None and dtype not in DTYPES:
        faults.append(f"dtype is {dtype!r}{nearest(dtype, DTYPES)}: use {', '.join(DTYPES)}")
    if decay not in DECAYS:
        faults.append(f"decay is {decay!r}: use {' or '.join(DECAYS)}")
    seq = seq if seq is not None else getattr(getattr(model, "config", None), "seq", None)
    if seq is None:
        faults.append("seq is missing: pass seq=..., since the model has no config.seq")
    if any(not p.is_meta for p in model.parameters()):
        faults.append("the model is not on the meta device: build it inside dtensor_lm.abstract(lambda: ...)")
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    if not dtypes:
        faults.append("the model has no parameters: nothing would be trained")
    if dtype is None and len(dtypes) > 1:
        faults.append(f"parameters have several dtypes ({', '.join(dtypes)}): pass dtype=... for all of them")
    elif dtype is None and dtypes and dtypes[0] not in DTYPES:
        faults.append(f"parameters are {dtypes[0]}: use {', '.join(DTYPES)}")
    faults += [
        f"buffer {name} is on the meta device and has no values: compute it in forward"
        for name, buffer in model.named_buffers()
        if buffer.is_meta
    ]
    if faults or seq is None:
        raise ModelError("resolve cannot use these arguments:", faults)
    data_ranks = mesh.product(plan.axes("compute", "batch"))
    options = PipelineOptions(schedule, virtual_stages, None if split is None else tuple(split), accumulate)
    if micro_batches is None:
        micro_batches = default_micro_batches(schedule, mesh.product(plan.axes("compute", LAYERS)), accumulate)
    batch = batch if batch is not None else data_ranks * micro_batches
    if dtype is not None and any(p.dtype != getattr(torch, dtype) for p in model.parameters()):
        model = copy.deepcopy(model).to(getattr(torch, dtype))
    # A batch that micro-batches do not divide is one of the plan's faults: all of them are shown together.
    record = trace(model, {"batch": max(1, batch // micro_batches), "seq": seq})
    return _Resolver(model, record, plan, mesh, batch, seq, micro_batches, decay, options).program()


DTYPES = ("float32", "bfloat16", "float64")
DECAYS = ("matrices", "all")


class _Resolver:
    def __init__(
        self,
        model: nn.Module,
        record: Trace,
        plan: Plan,
        mesh: Mesh,
        batch: int,
        seq: int,
        micro: int,
        decay: str,
        options: PipelineOptions,
    ) -> None:
        self.model, self.trace, self.plan, self.decay, self.options = model, record, plan, decay, options
        self.batch, self.seq, self.micro = batch, seq, micro
        self.live: dict[str, frozenset[str]] = {}
        names = names_of(record.regions, record.parents)
        self.checks = Checks(record, plan, mesh, names, batch, seq, micro)
        self.axis = pipeline_axis(plan, mesh, self.checks.add)
        self.mesh = self.checks.mesh = mesh.without(self.axis)  # of what one pipeline rank computes
        for path, (floats, _) in names.items():
            self.live[path] = frozenset(a for n in floats for a in self.axes("compute", n))

    def axes(self, table: str, name: str) -> tuple[str, ...]:
        return tuple(axis for axis in self.plan.axes(table, name) if self.mesh[axis] > 1)

    def _unordered(self, name: str) -> tuple[str, ...]:
        """A name's axes in the order of the mesh: sums and maxima do not care."""
        axes = self.axes("compute", name)
        return tuple(axis for axis in self.mesh.active if axis in axes)

    def program(self) -> Program:
        self.checks.run()
        self.checks.raise_faults()
        parameters = {name: self._parameter(name) for name in self.trace.parameters}
        regions = self._regions(parameters)
        gathers = self._gathers(parameters)
        pipeline = self._pipeline(parameters)
        self.checks.raise_faults()
        dtype = next(iter(parameters.values())).storage.dtype
        root = self.trace.calls[0]
        region = self.trace.region("")
        assert root.outputs[0] is not None
        output = self._layout("", region.outputs[0].inner, root.outputs[0])
        sizes: dict[str, int] = {}
        for found in self.trace.sizes.values():
            sizes = {**found, **sizes}
        program = Program(
            self.mesh.whole, self.plan, self.batch, self.seq, self.micro, dtype, parameters, regions, gathers, sizes,
            self._inputs(), output, self.model, pipeline,
        )  # fmt: skip
        return complete(program)

    def _pipeline(self, parameters: dict[str, Parameter]) -> Pipeline | None:
        add = self.checks.add
        if not self.axis:
            for name in self.options.said():
                add("", f"{name} is of a pipeline: give the mesh an axis for layers, such as pp=2, or leave it out")
            return None
        schedule = schedule_of(self.options, self.mesh.whole[self.axis], self.micro, add)
        if schedule is None:
            return None
        made = make_pipeline(
            self.axis, schedule, self.options, self.trace, self.micro,
            lambda crossing, value: self._layout("", crossing.outer, value), add,
        )  # fmt: skip
        cut = sorted({h.axis for p in parameters.values() for h in hops(p.gathered, p.gradients)})
        if made is not None and made.splits and cut:
            add("", f"schedule {schedule.name} splits backward in two halves, and gradients are reduced after the last "
                    f"of them, so {', '.join(cut)} cannot cut them before: in the plan's table gradients give names "
                    "the axes that they have in compute (in most plans embed -> ())")  # fmt: skip
        if made is not None and made.splits and not self.checks.faults:
            for fault in faults_of_halves(self.model, made, self._inputs()):
                add("", fault)
        return made

    def _inputs(self) -> dict[str, Layout]:
        """Integer inputs of the model, of a micro-batch."""
        root, region = self.trace.calls[0], self.trace.region("")
        return {n: self._layout("", region.inputs[n].inner, v) for n, v in root.inputs.items()}

    def _layout(self, path: str, spec: TensorSpec, value: Value, table: str = "compute") -> Layout:
        """Layout of a tensor inside a region."""
        dims = tuple(
            Dim(names, size, self.axes(table, names[0]) if names != ("_",) else ())
            for names, size in zip(spec.dims, value.shape, strict=True)
        )
        partial = frozenset(a for n in spec.sums for a in self.axes("compute", n))
        live = frozenset() if spec.whole or spec.kind != "float" else self.live[path]
        return Layout(self.mesh, value.dtype, dims, partial, live)

    def _parameter(self, name: str) -> Parameter:
        uses = [use for use in self.trace.uses if use.parameter == name]
        value, first = self.trace.parameters[name], uses[0]
        spec = TensorSpec(first.spec.dims)
        live = frozenset().union(*(self.live[use.region] for use in uses))
        layouts: dict[str, Any] = {
            table: replace(self._layout(first.region, spec, value, table), live=live)
            for table in ("compute", "storage", "gradients", "optimizer")
        }
        master = value.dtype if ITEMSIZE[value.dtype] >= 4 else "float32"
        matrix = len(value.shape) >= 2 and "bias" not in name.rsplit(".", 1)[-1]
        return Parameter(
            name,
            str(spec),
            self.decay == "all" or matrix,
            layouts["compute"],
            layouts["storage"],
            replace(layouts["gradients"], dtype=master),
            replace(layouts["optimizer"], dtype=master),
        )

    def _edge(
        self,
        call: Call,
        tensor: str,
        kind: str,
        source: Layout,
        target: Layout,
        value: Value,
        count: int,
        parameter: str = "",
    ) -> Edge | None:
        try:
            steps = edge_steps(source, target)
        except UnsupportedEdge as error:
            self.checks.add(call.path, f"{tensor}: {error}")
            return None
        return Edge(call.path, tensor, kind, source, target, steps, count, value.grad, parameter)

    def _regions(self, parameters: dict[str, Parameter]) -> dict[str, RegionPlan]:
        plans: dict[str, RegionPlan] = {}
        for path in self.trace.regions:
            calls = [call for call in self.trace.calls if call.path == path]
            if not calls:
                continue
            if any((c.inputs, c.outputs) != (calls[0].inputs, calls[0].outputs) for c in calls):
                self.checks.add(path, "is called with different shapes in one step, which is not supported")
            plans[path] = self._region(calls[0], len(calls) * self.micro, parameters)
        return plans

    def _region(self, call: Call, count: int, parameters: dict[str, Parameter]) -> RegionPlan:
        path, parent, region = call.path, call.parent, self.trace.region(call.path)
        inputs: dict[str, Edge] = {}
        outputs: list[Edge | None] = []
        if parent is not None:
            for name, value in call.inputs.items():
                crossing = region.inputs[name]
                source = self._layout(parent, crossing.outer, value)
                target = self._layout(path, crossing.inner, value)
                if edge := self._edge(call, name, "input", source, target, value, count):
                    inputs[name] = edge
            for i, (value_, crossing) in enumerate(zip(call.outputs, region.outputs, strict=True)):
                edge_ = None
                if value_ is not None:
                    source = self._layout(path, crossing.inner, value_)
                    target = self._layout(parent, crossing.outer, value_)
                    edge_ = self._edge(call, f"output {i}", "output", source, target, value_, count)
                outputs.append(edge_)
        uses: dict[str, Edge] = {}
        for use in self.trace.uses:
            if use.region == path:
                value = self.trace.parameters[use.parameter]
                target = self._layout(path, use.spec, value)
                source = parameters[use.parameter].gathered
                edge_ = self._edge(call, use.local, "parameter", source, target, value, count, use.parameter)
                if edge_ is not None:
                    uses[use.local] = edge_
        sizes = self.trace.sizes[path]
        indices, reducers, randoms = {}, {}, {}
        for name, crossing in region.inputs.items():
            (dim,) = crossing.inner.names if crossing.inner.kind in ("index", "reduce") else ("",)
            if crossing.inner.kind == "index":
                indices[name] = (dim, sizes[dim], self.axes("compute", dim))
            elif crossing.inner.kind == "reduce":
                reducers[name] = self._unordered(dim)
            elif crossing.inner.kind == "random":
                dims = crossing.inner.dims
                shape = tuple(math.prod(sizes[n] for n in names) for names in dims)
                randoms[name] = self._layout(path, crossing.inner, Value(shape, "int64", False))
                if any("batch" in names[1:] for names in dims):
                    self.checks.add(path, f"{name}: rows of a micro-batch are not together in '{crossing.inner}': name "
                                    "batch first in its dim")  # fmt: skip
                if count > self.micro:
                    self.checks.add(path, f"draws random numbers ({name}) and is called {count // self.micro} times in "
                                    "a step, each time the same: give every call a module of its own")  # fmt: skip
        return RegionPlan(
            path, self.trace.units[path], inputs, tuple(outputs), uses, indices, reducers, randoms, self.live[path],
            tuple(self._exchanges(call, count)),
        )  # fmt: skip

    def _exchanges(self, call: Call, count: int) -> Iterator[Collective]:
        """What a region exchanges itself over the parts of a name."""
        for r in call.reductions:
            if not (axes := self._unordered(r.name)):
                continue
            numel = 1
            for size, name in zip(r.shape, r.dims, strict=True):
                numel *= size // (self.mesh.product(self.axes("compute", name)) if name != "_" else 1)
            where = f"{call.path}: {r.op} over {r.name}"
            yield Collective("all_reduce", axes, r.dtype, numel * ITEMSIZE[r.dtype], count, "forward", where)

    def _gathers(self, parameters: dict[str, Parameter]) -> tuple[Gather, ...]:
        found: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for use in self.trace.uses:
            p = parameters[use.parameter]
            gather = tuple(h.axis for h in reversed(hops(p.gathered, p.storage)))
            scatter = tuple(h.axis for h in hops(p.gathered, p.gradients))
            if gather or scatter:
                names = found.setdefault((self.trace.units[use.region], gather, scatter), [])
                if use.parameter not in names:
                    names.append(use.parameter)
        calls = {path: sum(c.path == path for c in self.trace.calls) for path in self.trace.regions}
        made = []
        for (unit, gather, scatter), names in found.items():
            regather = self.plan.regather and bool(gather) and not self.trace.saved[unit].isdisjoint(names)
            backward = any(self.trace.parameters[name].grad for name in names)
            count = calls[unit] * self.micro
            again = count if regather and backward else 0
            made.append(Gather(unit, tuple(names), gather, scatter, regather, count, backward, again))
        return tuple(made)
