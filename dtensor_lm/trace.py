"""One run of a model on the meta device: which regions are called, with which shapes, and which parameters they keep.

The Program is made from this record, so it needs no process group, no memory and no guess: an edge exists because a
region was called, and a parameter is gathered again in backward because its values were saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_lm.chain import Chain, ChainRecorder
from dtensor_lm.errors import ModelError, nearest
from dtensor_lm.likeness import likeness, plain
from dtensor_lm.ops.dropout import Moment, Random, Site
from dtensor_lm.reach import Reach
from dtensor_lm.region import Region, TensorSpec, bind, signature
from dtensor_lm.signatures import (
    Shape,
    Signatures,
    Use,
    Value,
    argument_fault,
    dtype_name,
    output_fault,
    value_of,
)


@dataclass
class Reduction:
    """One exchange over the parts of a name inside a region (`reduce vocab`)."""

    name: str
    op: str
    dims: tuple[str, ...]
    shape: Shape
    dtype: str


@dataclass
class Call:
    """One call of a region. `parent` is the path of the enclosing region, None for the model itself."""

    path: str
    parent: str | None
    inputs: dict[str, Value] = field(default_factory=dict)
    outputs: list[Value | None] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)


@dataclass
class Trace:
    regions: dict[str, nn.Module]
    calls: list[Call]
    uses: list[Use]
    parameters: dict[str, Value]
    sizes: dict[str, dict[str, int]]
    parents: dict[str, str | None]
    units: dict[str, str]  # region -> the unit (a maximal region below the model, or '' itself) it belongs to
    saved: dict[str, frozenset[str]]  # unit -> parameters whose values backward asks for
    chain: Chain

    def region(self, path: str) -> Region:
        return signature(self.regions[path])


class _Tracer(Signatures):
    """Runs a model once and notes what its regions do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.calls: list[Call] = []
        self.stack: list[Call] = []
        self.seen: dict[Any, Any] = {}
        self.reach = Reach()
        self.moment = Moment.of(0, 0, device="meta")
        self.storage = {p.untyped_storage()._cdata: n for n, p in model.named_parameters()}
        self.saved: dict[str, set[str]] = {unit: set() for unit in set(self.units.values())}
        self.chain = ChainRecorder(self.storage)

    def run(self, model: nn.Module, arguments: Mapping[str, Tensor]) -> None:
        handles = []
        for path, module in self.regions.items():
            handles.append(module.register_forward_pre_hook(self._enter(path, module), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(path), with_kwargs=True))
        units = [path for path in self.regions if path and self.units[path] == path]
        for path in units:
            self.regions[path].forward = self._once(path, self.regions[path])
        parameters = [(m, name, p) for m in model.modules() for name, p in m._parameters.items()]
        names = {id(p): name for name, p in model.named_parameters()}
        modes = [(module, module.training) for module in model.modules()]
        model.train()  # a step trains, whatever mode the model is in
        for module, name, _ in parameters:
            module._parameters[name] = None  # a region sees the parameters that it names, and no others
        try:
            with (
                _Operations(self),
                torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t),
                torch.enable_grad(),
            ):
                out = model(**arguments)
                self.chain.end(x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor))
            reached = self.reach.settle(out, names)
        finally:
            for module, name, p in parameters:
                module._parameters[name] = p
            for module, training in modes:
                module.training = training
            for path in units:
                del self.regions[path].forward
            for handle in handles:
                handle.remove()
        for name, value in self.parameters.items():
            value.grad = name in reached
        for call in self.calls:
            if not any(value is not None and value.grad for value in call.outputs):
                for value in call.inputs.values():
                    value.grad = False

    def _pack(self, tensor: Tensor) -> Tensor:
        name = self.storage.get(tensor.untyped_storage()._cdata)
        if name is not None and self.stack:
            self.saved[self.units[self.stack[-1].path]].add(name)
        return tensor

    def _once(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """A forward that runs the first of equal layers, and copies its record for the others.

        On the meta device operators cost a third of a millisecond each; 126 layers would take seconds.
        """
        forward, like = module.forward, likeness(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            given = [(plain(v), isinstance(v, Tensor) and v.requires_grad) for v in args]
            key = (like, tuple(given), tuple((n, plain(v)) for n, v in kwargs.items()))
            if key in self.seen:
                self.chain.again(self.seen[key][-1])
                return self._copy(path, [*args, *kwargs.values()], *self.seen[key][:-1])
            before, first, spent = set(self.saved[path]), len(self.calls), self.chain.spent
            out = forward(*args, **kwargs)
            values = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, tuple | list) else []
            if values and all(isinstance(v, Tensor) for v in values):
                results = [value_of(v) for v in values]
                saved = self.saved[path] - before
                cost = self.chain.spent - spent
                self.seen[key] = (path, self.calls[first:], results, saved, isinstance(out, Tensor), cost)
            return out

        return run

    def _copy(
        self,
        path: str,
        inputs: list[Any],
        first: str,
        calls: list[Call],
        results: list[Value],
        saved: set[str],
        one: bool,
    ) -> Any:
        def moved(name: str) -> str:
            return path + name[len(first) :] if name == first or name.startswith(first + ".") else name

        for call in calls:
            self.calls.append(replace(call, path=moved(call.path), parent=moved(call.parent or "")))
        for name in [p for p in self.regions if p.startswith(first + ".")]:
            self.sizes[moved(name)] = dict(self.sizes[name])
        self.sizes[path].update(self.sizes[first])
        self.saved[path] |= {moved(name) for name in saved}
        out = self.reach.copy(results, inputs, moved)
        return out[0] if one else tuple(out)

    def _enter(self, path: str, module: nn.Module) -> Callable[..., Any]:
        region, binder = signature(module), bind(module.forward)
        own = self.own(module)

        def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
            call = Call(path, self.parents[path])
            self.calls.append(call)
            arguments = binder(*args, **kwargs)
            for name, value in list(arguments.arguments.items()):
                crossing = region.inputs.get(name)
                if fault := argument_fault(region, name, value):
                    self.faults.append(f"{path or 'the model'}: {fault}")
                elif crossing is None:
                    pass
                elif crossing.inner.kind == "reduce":
                    arguments.arguments[name] = _Recorder(call, crossing.inner.names[0])
                elif isinstance(value, Tensor):
                    self._tensor(call, name, value, crossing.inner, crossing.outer)
                    call.inputs[name] = self.reach.value(value)
            for name, spec in _randoms(region).items():
                arguments.arguments[name] = self._random(path, name, spec)
            if self._is_link(path):
                given = {n: (arguments.arguments[n], value) for n, value in call.inputs.items()}
                self.chain.enter(path, given, region.single)
            self.stack.append(call)
            for holder, attribute, parameter in own:
                holder._parameters[attribute] = parameter
            return arguments.args, arguments.kwargs

        return hook

    def _is_link(self, path: str) -> bool:
        """Whether it is a unit that the model itself calls."""
        return len(self.stack) == 1 and self.units[path] == path

    def _random(self, path: str, name: str, spec: TensorSpec) -> Random:
        """Numbers of the shape that is known here; what an inner region brings later is looked at in the end."""
        known = self.sizes[path]
        shape = [math.prod(known.get(n, 1) for n in names) for names in spec.dims]
        box = [(0, n) for n in shape] if known.keys() >= {*spec.names} else []
        return Site(f"{path}.{name}", shape, box, device="meta").at(self.moment)

    def _tensor(self, call: Call, name: str, value: Tensor, inner: TensorSpec, outer: TensorSpec) -> None:
        what = f"{call.path or 'the model'}: {name}"
        if value.is_floating_point() != (inner.kind == "float"):
            self.faults.append(f"{what} is {dtype_name(value.dtype)} but its signature says '{inner}'")
        self.learn(call.path, inner, tuple(value.shape), what)
        if call.parent is not None:
            self.learn(call.parent, outer, tuple(value.shape), what)

    def _leave(self, path: str) -> Callable[..., Any]:
        region, own = signature(self.regions[path]), self.own(self.regions[path])

        def hook(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            call = self.stack.pop()
            for holder, attribute, _parameter in own:
                holder._parameters[attribute] = None
            if fault := output_fault(region, out):
                self.faults.append(f"{path or 'the model'}: {fault}")
                return
            values = [out] if region.single else list(out)
            for i, (value, crossing) in enumerate(zip(values, region.outputs, strict=True)):
                if isinstance(value, Tensor):
                    self._tensor(call, f"output {i}", value, crossing.inner, crossing.outer)
                    call.outputs.append(self.reach.value(value))
                else:
                    call.outputs.append(None)
            if self._is_link(path):
                pairs = zip(values, call.outputs, strict=True)
                self.chain.leave((x, value) if isinstance(x, Tensor) and value else None for x, value in pairs)
            for name, spec in _randoms(region).items():
                self.faults += [
                    f"{path or 'the model'}: {name}: no tensor has the name {n!r}{nearest(n, self.sizes[path])}"
                    for n in spec.names
                    if n not in self.sizes[path]
                ]

        return hook


def _randoms(region: Region) -> dict[str, TensorSpec]:
    return {name: crossing.inner for name, crossing in region.inputs.items() if crossing.inner.kind == "random"}


class _Operations(TorchDispatchMode):
    """Sees every operator. Refuses random ones: each rank would draw its own numbers, and copies would part ways."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            where = (self.tracer.stack[-1].path if self.tracer.stack else "") or "the model"
            self.tracer.faults.append(
                f"{where}: {func} is random, and would differ between ranks: use dtensor_lm.ops.Dropout, or "
                "dtensor_lm.ops.dropout with an input 'random ...' of the region"
            )
        out = func(*args, **(kwargs or {}))
        self.tracer.chain.operation(func, args, kwargs or {}, out)
        return out


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operator draws: fused attention does so only with dropout_p."""
    names = [a.name for a in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, args, strict=False)) | {**kwargs}
    return bool(given.get("dropout_p", 0.0))


class _Recorder:
    """Stands for the parts of a name during the trace: notes what is exchanged."""

    def __init__(self, call: Call, name: str) -> None:
        self.call, self.name = call, name

    def _note(self, op: str, x: Tensor, dims: str) -> Tensor:
        self.call.reductions.append(Reduction(self.name, op, tuple(dims.split()), tuple(x.shape), dtype_name(x.dtype)))
        return x

    def sum(self, x: Tensor, dims: str) -> Tensor:
        return self._note("sum", x, dims)

    def max(self, x: Tensor, dims: str) -> Tensor:
        return self._note("max", x, dims)


def trace(model: nn.Module, sizes: Mapping[str, int]) -> Trace:
    """Runs `model` (on the meta device) once with integer inputs of the given sizes of names.

    Raises `ModelError` with everything that contradicts the signatures.
    """
    tracer = _Tracer(model)
    tracer.check_arguments(sizes)
    if not tracer.faults:
        arguments = {
            name: torch.empty([sizes[n] for n in crossing.inner.names], dtype=torch.int64, device="meta")
            for name, crossing in signature(model).inputs.items()
            if crossing.inner.kind == "int"
        }
        try:
            tracer.run(model, arguments)
        except Exception as error:
            where = tracer.stack[-1].path or "the model" if tracer.stack else "the model"
            tracer.faults.append(
                f"{where}: its code fails on the meta device: {type(error).__name__}: {error}"
                + (" (a region sees only parameters that stand in its params)" if "NoneType" in str(error) else "")
            )
    if tracer.faults:
        raise ModelError("the model contradicts its signatures:", list(dict.fromkeys(tracer.faults)))
    saved = {unit: frozenset(names) for unit, names in tracer.saved.items()}
    return Trace(
        tracer.regions,
        tracer.calls,
        tracer.uses,
        tracer.parameters,
        tracer.sizes,
        tracer.parents,
        tracer.units,
        saved,
        tracer.chain.chain,
    )
