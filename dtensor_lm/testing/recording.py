"""A copy of a model with real float64 values, and the record of one run: what every region took and gave."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dtensor_lm.errors import ModelError
from dtensor_lm.likeness import likeness, plain
from dtensor_lm.models.single import drawing
from dtensor_lm.ops.cross_entropy import IGNORE
from dtensor_lm.ops.dropout import Moment
from dtensor_lm.region import Region, bind, factors, is_region, signature
from dtensor_lm.signatures import argument_fault, output_fault

BATCH, SEQ = 6, 12  # both divide by 2 and 3
MOMENT = Moment.of(0, 0)  # whose random numbers a region gets


def real_copy(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy in float64 with random parameters; tied ones stay tied."""
    if not is_region(model):
        raise ModelError("the model itself must be a region: give its class a `region`")
    model = copy.deepcopy(model)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in made:
                x = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                made[id(p)] = nn.Parameter(x + 1 if p.ndim < 2 else x / math.sqrt(p.shape[-1]))
            module._parameters[name] = None if p is None else made[id(p)]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                raise ModelError(f"buffer {name} is on the meta device without values: compute it in forward")
            module._buffers[name] = b.cpu().double() if b is not None and b.is_floating_point() else b
    claimed = {f"{path}.{local}".lstrip(".") for path, m in model.named_modules(remove_duplicate=False)
               if is_region(m) for local in signature(m).params}  # fmt: skip
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    faults = [f"{n}: no region names its dims" for n in names if n not in claimed]
    for path, m in model.named_modules():
        known = inspect.signature(m.forward).parameters if is_region(m) else {}
        faults += [f"{path or 'the model'}: forward has no parameter {n!r}: it has {', '.join(known)}"
                   for n in (signature(m).inputs if is_region(m) else ()) if n not in known]  # fmt: skip
    faults += [f"{n}: a region names a parameter that does not exist" for n in sorted(claimed - {*names})]
    if faults:
        raise ModelError("the model contradicts its signatures:", faults)
    return model.train()


def random_batch(model: nn.Module, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
    known = {"batch": BATCH, "seq": sizes.get("res", SEQ), "res": sizes.get("seq", SEQ)}
    for module in filter(is_region, model.modules()):
        for local, spec in signature(module).params.items():
            for names, size in zip(spec.dims, module.get_parameter(local).shape, strict=False):
                known.update(factors(module, names, size) if names != ("_",) else {})
    known.update(sizes)
    arguments = {}
    for name, crossing in signature(model).inputs.items():
        spec = crossing.inner
        if missing := [n for dim in spec.dims for n in dim if n not in known]:
            raise ModelError(f"input {name}: give its size: sizes={{{missing[0]!r}: ...}}, or a batch")
        shape = [math.prod(known[n] for n in dim) for dim in spec.dims]
        if spec.kind == "float":
            arguments[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        elif spec.kind == "int":
            arguments[name] = torch.randint(0, known.get("vocab", 2), shape, generator=generator)
            if name == "labels":
                arguments[name].view(-1)[1::5] = IGNORE  # some are masked
    return arguments


@dataclass
class Call:
    """One call of a region in the whole run: what it took and gave, and the calls of the regions inside."""

    path: str
    module: nn.Module
    arguments: Any  # inspect.BoundArguments
    outputs: list[Any] = field(default_factory=list)
    inner: list[Call] = field(default_factory=list)

    def key(self) -> Any:
        """Equal for calls that compute the same function of tensors of the same shapes."""

        return likeness(self.module), tuple((n, plain(v)) for n, v in self.arguments.arguments.items())


def record(model: nn.Module, arguments: Mapping[str, Tensor]) -> list[Call]:
    """Runs the model once; every call of a region, in order."""
    calls: list[Call] = []
    stack: list[Call] = []
    handles = []

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = bind(module.forward)(*args, **kwargs)
        region = signature(module)
        faults = [fault for n, v in bound.arguments.items() if (fault := argument_fault(region, n, v))]
        if faults:
            raise ModelError(f"{path or 'the model'} contradicts its signature:", faults)
        bound.arguments.update({n: kept(v) for n, v in bound.arguments.items()})
        calls.append(Call(path, module, bound))
        if stack:
            stack[-1].inner.append(calls[-1])
        stack.append(calls[-1])

    def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call = stack.pop()
        if fault := output_fault(signature(module), out):
            raise ModelError(f"{call.path or 'the model'} contradicts its signature:", [fault])
        call.outputs = [kept(x) for x in outputs_of(signature(module), out)]

    for path, module in model.named_modules():
        if is_region(module):
            before = functools.partial(enter, path)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        with torch.no_grad(), drawing(model, MOMENT):
            model(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def outputs_of(region: Region, out: Any) -> tuple[Any, ...]:
    return (out,) if region.single else tuple(out)
