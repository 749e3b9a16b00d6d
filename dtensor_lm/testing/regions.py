"""The law of regions, checked numerically: one process, float64, region by region and cut by cut.

    print(check_regions(models.build("tiny", layers=2)))

A region declares in `cuts` what may be cut. For each cut its tensors are cut into k parts, its code runs on every
part, and what the parts give must be what the whole gives, forward and backward. A region with regions inside is
checked as the function from (inputs, parameters, what inner regions gave) to (outputs, what inner regions took). A
model whose regions obey the law is right under every plan and mesh.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dtensor_lm.errors import ModelError
from dtensor_lm.ops.cross_entropy import IGNORE
from dtensor_lm.ops.parts import Whole
from dtensor_lm.region import Region, TensorSpec
from dtensor_lm.trace import bind, factors, is_region, signature

TOLERANCE = 1e-9  # of the largest element of what is compared
MOST_PARTS = 64  # the largest k that is tried unless `ks` says otherwise
BATCH, SEQ = 6, 12  # both divide by 2 and 3
_EXCHANGE_SECONDS = 60.0

# States of an axis on a tensor: S it cuts one of its dims, P the parts hold addends, R equal values, I equal values
# on which nothing may depend. What the parts hold of values and of gradients:
_VALUES = {"S": "slices", "P": "addends", "R": "copies", "I": "copies"}
_GRADIENTS = {"S": "slices", "P": "copies", "R": "addends", "I": "copies"}

Specs = Mapping[str, TensorSpec]
Cut = frozenset[str]


@dataclass(frozen=True)
class Violation:
    """One tensor that breaks the law. error: relative to the tensor's largest element, inf where nothing compares.

    hint: the one change of the signature after which this cut is lawful, found by trying, or what not to declare.
    """

    region: str
    cut: str
    k: int
    tensor: str
    error: float
    hint: str
    detail: str = ""

    def __str__(self) -> str:
        what = self.detail or f"off by {self.error:.1e} of its largest element"
        return f"{self.region or 'the model'}: cut {self.cut} by {self.k}: {self.tensor}: {what}; {self.hint}"


@dataclass
class Report:
    """What `check_regions` found.

    checked: (region, cut, k); unchecked: (region, cut) whose sizes no k divides; hints: (region, cut) that is lawful
    but not declared; same: regions that are equal to a checked one (class, settings, shapes) and were not run again.
    """

    violations: list[Violation] = field(default_factory=list)
    checked: list[tuple[str, str, int]] = field(default_factory=list)
    unchecked: list[tuple[str, str]] = field(default_factory=list)
    hints: list[tuple[str, str]] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        cuts = len({(region, cut) for region, cut, _ in self.checked})
        regions = len({region for region, _, _ in self.checked})
        lines = [f"{cuts} cuts of {regions} regions, {len(self.checked)} checks: "
                 + ("lawful" if self.ok else f"{len(self.violations)} violations")]  # fmt: skip
        lines += [f"  - {violation}" for violation in self.violations]
        lines += [f"  not checked: {r or 'the model'}: {cut}: no k divides it" for r, cut in self.unchecked]
        lines += [f"  hint: {r or 'the model'}: {cut} is lawful and could be added to cuts" for r, cut in self.hints]
        lines += [f"  {path} is the same as {other}" for path, other in self.same.items()]
        return "\n".join(lines)


def check_regions(
    model: nn.Module,
    batch: Mapping[str, Tensor] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    ks: Sequence[int] | None = None,
    seed: int = 0,
) -> Report:
    """Checks every region of `model` (itself a region, on the meta device or real) for every cut it declares.

    The model is copied; the copy is float64 on the CPU and all its parameters are random (zeros and ones of initial
    values hide faults), so take a narrow model of the same code: memory is some copies of it.
    batch: inputs of the model by name; without it they are random, with `sizes` of names (default: batch 6, seq 12).
    ks: numbers of parts (default: 2, 3 and the largest up to 64); those that do not divide a cut are left out.
    Dropout must be off: a part draws other numbers than the whole.

    Raises `ModelError` where signatures contradict the code.
    """
    generator = torch.Generator().manual_seed(seed)
    model = _real(model, generator)
    arguments = batch if batch is not None else _batch(model, sizes or {}, generator)
    arguments = {name: x.cpu().double() if x.is_floating_point() else x.cpu() for name, x in arguments.items()}
    report, seen = Report(), dict[Any, str]()
    for call in _record(model, arguments):
        other = seen.setdefault(call.key(), call.path)
        if other == call.path and call.path not in report.same:
            _Piece(call, generator).check(report, ks)
        elif other != call.path:
            report.same[call.path] = other
    return report


# ---- one run of the whole model ------------------------------------------------------------------------------


def _real(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy in float64 with random parameters; tied ones stay tied."""
    if not is_region(model):
        raise ModelError("the model itself must be a region: give its class a `region` with inputs and outputs")
    model = copy.deepcopy(model)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in made:
                x = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                made[id(p)] = nn.Parameter(x + 1 if p.ndim < 2 else x / math.sqrt(p.shape[-1]))
                made[id(made[id(p)])] = made[id(p)]
            module._parameters[name] = None if p is None else made[id(p)]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                raise ModelError(f"buffer {name} is on the meta device and has no values: compute it in forward")
            module._buffers[name] = b.cpu().double() if b is not None and b.is_floating_point() else b
    claimed = {f"{path}.{local}".lstrip(".") for path, m in model.named_modules(remove_duplicate=False)
               if is_region(m) for local in signature(m).params}  # fmt: skip
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    faults = [f"{n}: no region names its dims" for n in names if n not in claimed]
    faults += [f"{n}: a region names a parameter that does not exist" for n in sorted(claimed - {*names})]
    if faults:
        raise ModelError("the model contradicts its signatures:", faults)
    return model.train()


def _batch(model: nn.Module, sizes: Mapping[str, int], generator: torch.Generator) -> dict[str, Tensor]:
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
class _Call:
    """One call of a region in the whole run: what it took and gave, and the calls of the regions inside."""

    path: str
    module: nn.Module
    arguments: Any  # inspect.BoundArguments
    outputs: list[Any] = field(default_factory=list)
    inner: list[_Call] = field(default_factory=list)

    def key(self) -> Any:
        """Equal for calls that compute the same function of tensors of the same shapes."""

        def plain(value: Any) -> Any:
            if isinstance(value, Tensor):
                return (value.shape, value.dtype)
            return value if value.__hash__ is not None else id(value)

        modules = tuple(
            (path, type(m), tuple((n, plain(v)) for n, v in vars(m).items() if n[0] != "_"),
             tuple((n, p.shape) for n, p in m.named_parameters(recurse=False)), tuple(map(id, m.buffers(False))))
            for path, m in self.module.named_modules(remove_duplicate=False)
        )  # fmt: skip
        return modules, tuple((n, plain(v)) for n, v in self.arguments.arguments.items())


def _record(model: nn.Module, arguments: Mapping[str, Tensor]) -> list[_Call]:
    calls: list[_Call] = []
    stack: list[_Call] = []
    handles = []

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = bind(module.forward)(*args, **kwargs)
        bound.arguments.update({n: _kept(v) for n, v in bound.arguments.items()})
        calls.append(_Call(path, module, bound))
        if stack:
            stack[-1].inner.append(calls[-1])
        stack.append(calls[-1])

    def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        stack.pop().outputs = [_kept(x) for x in _tuple(signature(module), out)]

    for path, module in model.named_modules():
        if is_region(module):
            before = functools.partial(enter, path)
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True))
    with torch.no_grad():
        model(**arguments)
    for handle in handles:
        handle.remove()
    return calls


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _tuple(region: Region, out: Any) -> tuple[Any, ...]:
    return (out,) if region.single else tuple(out)


# ---- one region, whole and in parts --------------------------------------------------------------------------


class _Piece:
    """One region taken out of the model. Tensors that enter and leave it, and their specs, are kept by label."""

    def __init__(self, call: _Call, generator: torch.Generator) -> None:
        self.call, self.generator = call, generator
        self.region, self.specs = signature(call.module), dict[str, TensorSpec]()
        self.enter: dict[str, Tensor] = {}
        self.leave: dict[str, Tensor] = {}
        self.given = {n: c.inner for n, c in self.region.inputs.items()
                      if c.inner.kind in ("index", "reduce") and call.arguments.arguments.get(n) is None}  # fmt: skip
        paths = {id(m): p for p, m in call.module.named_modules() if is_region(m)}
        self.inner: dict[str, list[tuple[str, _Call]]] = {}
        for name, crossing in self.region.inputs.items():
            self._add(self.enter, name, crossing.inner, call.arguments.arguments.get(name))
        for name, spec in self.region.params.items():
            self._add(self.enter, name, spec, call.module.get_parameter(name).detach())
        for one in call.inner:
            if id(one.module) not in paths:
                raise ModelError(f"{one.path} is called by {call.path or 'the model'}, which does not contain it")
            calls = self.inner.setdefault(paths[id(one.module)], [])
            label = f"inner {paths[id(one.module)]}" + (f" (call {len(calls) + 1})" if calls else "")
            calls.append((label, one))
            for name, crossing in signature(one.module).inputs.items():
                self._add(self.leave, f"{label}.{name}", crossing.outer, one.arguments.arguments.get(name))
            for i, crossing in enumerate(signature(one.module).outputs):
                self._add(self.enter, f"{label} output {i}", crossing.outer, one.outputs[i])
        for i, crossing in enumerate(self.region.outputs):
            self._add(self.leave, f"output {i}", crossing.inner, call.outputs[i])
        self.sizes = self._sizes()
