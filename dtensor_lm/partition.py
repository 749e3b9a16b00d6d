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

from dtensor_lm.collectives import BoundEdge, GroupParts
from dtensor_lm.errors import ModelError
from dtensor_lm.gathering import Gathered, GatherGroup, Own, Regather
from dtensor_lm.layout import Layout, block
from dtensor_lm.mesh import Mesh
from dtensor_lm.ops.dropout import Moment, Site
from dtensor_lm.region import bind, signature
from dtensor_lm.sharding_plans.program import Program, RegionPlan
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
        self.regathered: Regather | None = None
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
            unit: [GatherGroup(g, program, rank) for g in program.gathers_of(unit)]
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
        self, call: _RegionCall, groups: list[GatherGroup], names: list[str], owner: Partitioned, root: bool
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
            again = Regather(self.owner, self.root)
            for g in self.groups:
                shards = [values[n] for n in g.names]
                if self.owner.halves and torch.is_grad_enabled():
                    wholes = g.gather(shards)
                    out = tuple(cast(Tensor, Own.apply(x, leaves[n], g.dtype))
                                for n, x in zip(g.names, wholes, strict=True))  # fmt: skip
                else:
                    out = cast("tuple[Tensor, ...]", Gathered.apply(g, again, *shards, *[leaves[n] for n in g.names]))
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
