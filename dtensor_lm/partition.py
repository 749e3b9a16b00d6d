"""Program x model -> the module that runs on one rank, with plain tensors inside regions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from dtensor_lm.collectives import BoundEdge, GroupParts
from dtensor_lm.errors import ModelError
from dtensor_lm.layout import Layout, block
from dtensor_lm.mesh import Mesh
from dtensor_lm.ops.dropout import Moment, Site
from dtensor_lm.region import bind, signature
from dtensor_lm.rounds import BoundRound
from dtensor_lm.sharding_plans.predict import gather_rounds, scatter_rounds
from dtensor_lm.sharding_plans.program import Gather, Program, RegionPlan
from dtensor_lm.spans import Span


def partition(program: Program, model: nn.Module, device: torch.device | str = "cpu") -> Partitioned:
    """The module that this rank runs. Needs a process group of as many ranks as the Program's mesh.

    model: the model that the Program was made from; it is not changed.
    Raises `MeshError` where the world does not fit.
    """
    program.mesh.check_world(dist.get_world_size())
    if program.pipeline is not None:
        raise ValueError("a Program with a pipeline has several parts: dtensor_lm.train_step runs them")
    return Partitioned(program, model, torch.device(device))


class Partitioned(nn.Module):
    """One rank's part of a model. Parameters are not stored in it: every call is given them.

    `forward(leaves, values, moment, **inputs)`: leaves are tensors in the gradients' layout whose `.grad` backward
    fills; values are parameters in the storage layout; moment is what random numbers depend on; inputs are this rank's
    part of the model's integer inputs. Returns what the model returns, in the Program's output layout (a loss is this
    rank's addend). What backward computes again, it computes with what its own forward was given.

    program: of one stage where there is a pipeline; forward is then also given what the stage before `received`, and
    all stages but the last return the tuple of tensors that the next one takes.
    """

    def __init__(self, program: Program, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.program = program
        self.model = copy.deepcopy(model)
        if any(b.is_meta for b in self.model.buffers()):
            names = [n for n, b in self.model.named_buffers() if b.is_meta]
            raise ModelError("buffers on the meta device have no values: compute them in forward", names)
        for module in self.model.modules():
            module._buffers = {name: b if b is None else b.to(device) for name, b in module._buffers.items()}
        self.device = device
        self.homes: dict[str, Tensor] = {}  # canonical name -> what regions of the running unit use
        self.given: Given | None = None
        rank = dist.get_rank()
        place = program.mesh.coordinate(rank)
        self.shapes = {name: layout.local_shape(place) for name, layout in program.inputs.items()}
        self.regathered: _Regather | None = None
        pipe = program.pipeline
        self.halves = pipe is not None and pipe.splits
        self.span: Span | None = None
        if pipe is not None:
            assert program.held is not None
            (stage,) = program.held
            self.span = Span(pipe, stage, place, device)
        watched = dict.fromkeys(link.unit for link in pipe.links) if pipe is not None else {}
        binders = {unit: bind(self.model.get_submodule(unit).forward) for unit in watched}
        groups = {
            unit: [_GatherGroup(g, program, rank) for g in program.gathers_of(unit)]
            for unit in {plan.unit for plan in program.regions.values()}
        }
        units: dict[str, list[str]] = {}
        for plan in program.regions.values():
            names = units.setdefault(plan.unit, [])
            names += [e.parameter for e in plan.parameters.values() if e.parameter not in names]
        for path, plan in program.regions.items():
            module = self.model.get_submodule(path)
            call = _RegionCall(module, plan, program.mesh, rank, device, self)
            forward: Callable[..., Any] = call
            if plan.unit == path:
                forward = _UnitCall(call, groups[path], units[path], self, path == "")
            module.forward = forward
        for unit, binder in binders.items():
            assert self.span is not None
            self.span.watch(self.model.get_submodule(unit), binder)
        for module in self.model.modules():
            for name in list(module._parameters):
                del module._parameters[name]
                module.__dict__[name] = None
        for local, layout in program.regions[""].absent.items():
            assert self.span is not None
            holder, _, attribute = local.rpartition(".")
            self.model.get_submodule(holder).__dict__[attribute] = self.span.any_values(layout)

    def forward(
        self,
        leaves: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        moment: Moment | None = None,
        received: Sequence[Tensor] = (),
        **inputs: Tensor,
    ) -> Any:
        if inputs.keys() != self.shapes.keys():
            raise ValueError(f"the model's inputs are {', '.join(self.shapes)}, not {', '.join(inputs) or 'nothing'}")
        for name, x in inputs.items():
            if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.device.type != self.device.type:
                what = f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else repr(type(x))
                raise ValueError(f"{name} is {what}: an int64 tensor on {self.device} is expected")
            if tuple(x.shape) != self.shapes[name]:
                raise ValueError(
                    f"{name} has shape {list(x.shape)}; this Program gives this rank {list(self.shapes[name])} of "
                    f"{self.program.inputs[name]}"
                )
        given = self.given = Given(leaves, values, moment or Moment.of(0, 0, device=self.device))
        try:
            out = self.span.run(self.model, received, inputs) if self.span is not None else self.model(**inputs)
        finally:
            self.homes.clear()
        for x in out if isinstance(out, tuple) else (out,):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(lambda _: setattr(self, "given", given))
        return out

    def release(self) -> None:
        """Lets go of what the last forward was given, and of what a backward gathered again."""
        self.given = None
        if self.regathered is not None:
            self.regathered.release()


@dataclass(frozen=True)
class Given:
    """What one forward was given beside the model's inputs."""

    leaves: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    moment: Moment


class _RegionCall:
    """The border of one region: edges in, parameters in place, the region's own code, edges out."""

    def __init__(
        self,
        module: nn.Module,
        plan: RegionPlan,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        owner: Partitioned,
    ) -> None:
        self.run, self.owner = module.forward, owner
        self.bind = bind(module.forward)
        self.single = signature(module).single
        self.inputs = {n: BoundEdge(mesh, e.steps) for n, e in plan.inputs.items() if e.steps}
        self.outputs = [BoundEdge(mesh, e.steps) if e is not None and e.steps else None for e in plan.outputs]
        place = mesh.coordinate(rank)
        self.supplied: dict[str, Any] = {
            name: torch.arange(*block(size, axes, mesh, place), device=device)
            for name, (_, size, axes) in plan.indices.items()
        }
        self.supplied.update({n: GroupParts(mesh, axes) for n, axes in plan.reducers.items() if axes})
        rows = owner.program.batch // owner.program.micro_batches
        self.sites = {
            name: _site(f"{plan.path}.{name}", layout, rows, owner.program.micro_batches, place, device)
            for name, layout in plan.randoms.items()
        }
        self.parameters = []
        for local, edge in plan.parameters.items():
            path, _, attribute = local.rpartition(".")
            holder = module.get_submodule(path).__dict__
            self.parameters.append((holder, attribute, edge.parameter, BoundEdge(mesh, edge.steps)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.bind(*args, **kwargs)
        arguments = bound.arguments
        for name, edge in self.inputs.items():
            if isinstance(arguments[name], Tensor):
                arguments[name] = edge(arguments[name])
        for name, value in self.supplied.items():
            if arguments[name] is None:
                arguments[name] = value
        for name, site in self.sites.items():
            if arguments[name] is None:
                assert self.owner.given is not None
                arguments[name] = site.at(self.owner.given.moment)
        homes = self.owner.homes
        try:
            for holder, attribute, name, edge in self.parameters:
                holder[attribute] = edge(homes[name])
            out = self.run(*bound.args, **bound.kwargs)
        finally:
            for holder, attribute, _, _ in self.parameters:
                holder[attribute] = None
        if self.single:
            edge_ = self.outputs[0] if self.outputs else None
            return edge_(out) if edge_ else out
        return tuple(e(x) if e else x for e, x in zip(self.outputs, out, strict=True))


def _site(
    name: str, layout: Layout, rows: int, micro_batches: int, place: Mapping[str, int], device: torch.device
) -> Site:
    """This rank's part of random numbers for all rows of a step, of which a micro-batch has `rows`."""
    whole, row_stride = [dim.size for dim in layout.dims], 0
    for i, dim in enumerate(layout.dims):
        if dim.names[0] == "batch":
            whole[i] *= micro_batches
            row_stride = dim.size // rows * math.prod(whole[i + 1 :])
    return Site(name, whole, layout.box(place), row_stride=row_stride, device=device)


class _UnitCall:
    """A unit gathers its parameters, runs, and lets go of them; what backward needs again it gathers again."""

    def __init__(
        self, call: _RegionCall, groups: list[_GatherGroup], names: list[str], owner: Partitioned, root: bool
    ) -> None:
        self.call, self.groups, self.owner, self.root = call, groups, owner, root
        gathered = {n for g in groups for n in g.names}
        self.plain = [n for n in names if n not in gathered]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.owner.given
        assert given is not None
        leaves, values = given.leaves, given.values
        homes = {name: leaves[name] for name in self.plain}
        hooks: Any = nullcontext()
        if self.groups:
            again = _Regather(self.owner, self.root)
            for g in self.groups:
                shards = [values[n] for n in g.names]
                if self.owner.halves and torch.is_grad_enabled():
                    wholes = g.gather(shards)
                    out = tuple(cast(Tensor, _Own.apply(x, leaves[n], g.dtype))
                                for n, x in zip(g.names, wholes, strict=True))  # fmt: skip
                else:
                    out = cast("tuple[Tensor, ...]", _Gathered.apply(g, again, *shards, *[leaves[n] for n in g.names]))
                homes.update(zip(g.names, out, strict=True))
                if g.regather and torch.is_grad_enabled():
                    again.register(g, shards, out)
            if again.places:
                hooks = torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack)
        outer, self.owner.homes = self.owner.homes, {**self.owner.homes, **homes}
        try:
            with hooks:
                return self.call(*args, **kwargs)
        finally:
            self.owner.homes = outer


class _GatherGroup:
    """The coalesced collectives of one `Gather`, bound to this rank."""

    def __init__(self, g: Gather, program: Program, rank: int) -> None:
        self.names, self.regather = g.parameters, g.regather
        members = {n: program.parameters[n] for n in g.parameters}
        layouts = {n: (p.storage, p.gathered) for n, p in members.items()}
        self.forward = [BoundRound(r, program.mesh, rank) for r in gather_rounds(layouts, program.dtype)]
        back = {n: (p.gathered, p.gradients) for n, p in members.items()}
        self.backward = [BoundRound(r, program.mesh, rank) for r in scatter_rounds(back, program.master_dtype)]
        self.dtype = getattr(torch, program.master_dtype)

    def gather(self, shards: list[Tensor]) -> list[Tensor]:
        have = dict(zip(self.names, shards, strict=True))
        for r in self.forward:
            have.update(r.gather(have))
        return [have[n] for n in self.names]

    def scatter(self, grads: list[Tensor]) -> list[Tensor]:
        have = {n: g.to(self.dtype) for n, g in zip(self.names, grads, strict=True)}
        for r in self.backward:
            have.update(r.scatter(have))
        return [have[n] for n in self.names]


class _Gathered(torch.autograd.Function):
    """Shards -> what regions use. The gradient goes to the leaves, which lie in the gradients' layout."""

    @staticmethod
    def forward(ctx: FunctionCtx, g: _GatherGroup, again: _Regather, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.again = g, again  # type: ignore[attr-defined]
        ctx.set_materialize_grads(True)
        shards = tensors[: len(g.names)]
        return tuple(t.view_as(t) for t in g.gather(list(shards)))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, again = ctx.group, ctx.again  # type: ignore[attr-defined]
        again.release()
        return (None, None, *[None] * len(g.names), *g.scatter(list(grads)))


class _Own(torch.autograd.Function):
    """One gathered parameter. A backward in two halves needs a node for each: with one for a whole unit, its second
    half would go through all of the unit again. Here gradients stay as they are until the step reduces them."""

    @staticmethod
    def forward(ctx: FunctionCtx, gathered: Tensor, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype  # type: ignore[attr-defined]
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, grads[0].to(ctx.dtype), None  # type: ignore[attr-defined]


class _Regather:
    """One call of a unit: saved tensors that live in gathered storage are kept as (shard, view) and gathered again."""

    def __init__(self, owner: Partitioned, root: bool) -> None:
        self.owner, self.root = owner, root
        self.places: dict[int, tuple[int, int]] = {}
        self.groups: list[tuple[_GatherGroup, list[Tensor]]] = []
        self.cache: dict[int, list[Tensor]] = {}

    def register(self, g: _GatherGroup, shards: list[Tensor], out: tuple[Tensor, ...]) -> None:
        for i, whole in enumerate(out):
            if whole.untyped_storage().data_ptr() != shards[i].untyped_storage().data_ptr():
                self.places[whole.untyped_storage().data_ptr()] = (len(self.groups), i)
        self.groups.append((g, shards))

    def pack(self, x: Tensor) -> Any:
        place = self.places.get(x.untyped_storage().data_ptr()) if x.numel() else None
        return x if place is None else (place, x.size(), x.stride(), x.storage_offset())

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        (which, i), size, stride, offset = kept
        if which not in self.cache:
            # Backward goes unit by unit, so only one of them holds whole weights; the model's own parameters may
            # be asked for before, between and after its units, and stay.
            if not self.root:
                if self.owner.regathered is not None and self.owner.regathered is not self:
                    self.owner.regathered.release()
                self.owner.regathered = self
            g, shards = self.groups[which]
            with torch.no_grad():
                self.cache[which] = g.gather(shards)
        return self.cache[which][i].as_strided(size, stride, offset)

    def release(self) -> None:
        self.cache.clear()
        if self.owner.regathered is self:
            self.owner.regathered = None
