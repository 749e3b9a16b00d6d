"""One region taken out of a model, run whole and in parts: the law of regions in numbers.

Tensors that enter a region are its inputs, its parameters and what regions inside it gave; those that leave it are its
outputs and what regions inside it took. Inner regions are replaced by the record of one run of the whole model, so the
region is a function of its own.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dtensor_lm.errors import ModelError
from dtensor_lm.ops.parts import Whole
from dtensor_lm.region import Region, TensorSpec
from dtensor_lm.trace import bind, factors, is_region, signature

TOLERANCE = 1e-9
EXCHANGE_SECONDS = 60.0

# What k parts hold of the values and of the gradients of a tensor, by the state of the axis that cuts the region:
# S it cuts one of the tensor's dims, P the parts sum to it, R they hold equal values, I as R but nothing in the
# region may depend on the axis.
VALUES = {"S": "slices", "P": "addends", "R": "copies", "I": "copies"}
GRADIENTS = {"S": "slices", "P": "copies", "R": "addends", "I": "copies"}

Cut = frozenset[str]
Specs = Mapping[str, TensorSpec]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Fault:
    """A tensor on which the parts and the whole disagree. error: relative to its largest element."""

    tensor: str
    error: float
    detail: str = ""


# ---- the record of one run of the whole model --------------------------------------------------------------


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


def record(model: nn.Module, arguments: Mapping[str, Tensor]) -> list[Call]:
    """Runs the model once; every call of a region, in order."""
    calls: list[Call] = []
    stack: list[Call] = []
    handles = []

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = bind(module.forward)(*args, **kwargs)
        bound.arguments.update({n: _kept(v) for n, v in bound.arguments.items()})
        calls.append(Call(path, module, bound))
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
    try:
        with torch.no_grad():
            model(**arguments)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _tuple(region: Region, out: Any) -> tuple[Any, ...]:
    return (out,) if region.single else tuple(out)


# ---- one region as a function of its own -------------------------------------------------------------------


class Piece:
    """A region and the tensors that enter and leave it: values and specs (in the region's own names) by label."""

    def __init__(self, call: Call, generator: torch.Generator) -> None:
        self.call, self.region, self.generator = call, signature(call.module), generator
        self.specs: dict[str, TensorSpec] = {}
        self.enter: Tensors = {}
        self.leave: Tensors = {}
        self.inner: dict[str, list[tuple[str, Call]]] = {}  # path below the region -> its calls and their labels
        self.given = {}  # what the framework supplies
        for name, crossing in self.region.inputs.items():
            value = call.arguments.arguments.get(name)
            self._add(self.enter, name, crossing.inner, value)
            if value is None and crossing.inner.kind in ("index", "reduce"):
                self.given[name] = crossing.inner
        for name, spec in self.region.params.items():
            self._add(self.enter, name, spec, call.module.get_parameter(name).detach())
        for i, crossing in enumerate(self.region.outputs):
            self._add(self.leave, f"output {i}", crossing.inner, call.outputs[i])
        paths = {id(m): path for path, m in call.module.named_modules()}
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
        self.sizes = self._sizes()
        leaves = _leaves(self.enter)
        self.whole = self.run(leaves, self.supplied(frozenset(), 1)[0])
        self.cotangents = {label: self._randn(x) for label, x in self.whole.items() if x.is_floating_point()}
        self.grads = _backward(self.whole, leaves, self.cotangents)

    def _add(self, where: Tensors, label: str, spec: TensorSpec, value: Any) -> None:
        if isinstance(value, Tensor):
            where[label], self.specs[label] = value, spec

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        faults = []
        for label, value in (*self.enter.items(), *self.leave.items()):
            spec = self.specs[label]
            if len(spec.dims) != value.ndim:
                faults.append(f"{label}: signature '{spec}' has {len(spec.dims)} dims, the tensor {[*value.shape]}")
                continue
            for names, size in zip(spec.dims, value.shape, strict=True):
                try:
                    found = factors(self.call.module, names, size) if names != ("_",) else {}
                except ValueError as error:
                    faults.append(f"{label}: {error}")
                    continue
                faults += [f"{label}: {n} has size {v} here and {sizes[n]} elsewhere in the region"
                           for n, v in found.items() if sizes.setdefault(n, v) != v]  # fmt: skip
        faults += [f"{n}: no tensor has its name" for n, s in self.given.items() if s.names[0] not in sizes]
        if faults:
            title = f"{self.call.path or 'the model'} contradicts its signature:"
            raise ModelError(title, faults)
        return sizes

    def names(self) -> list[str]:
        """Names by which some tensor can be cut, or is summed over."""
        specs = self.specs.values()
        first = {n for spec in specs for n in (*(dim[0] for dim in spec.dims), *spec.sums)}
        return sorted(first - {"_"} - {n for spec in specs for dim in spec.dims for n in dim[1:]})

    def run(self, values: Tensors, given: Mapping[str, Any]) -> Tensors:
        """What leaves the region, from what enters it. Works on a copy of the module: parts may run at once."""
        module = copy.deepcopy(self.call.module, {id(p): p for p in self.call.module.parameters()})
        leave: Tensors = {}
        for path, calls in self.inner.items():
            inner = module.get_submodule(path)
            inner.forward = _Stub(inner, calls, values, leave)  # type: ignore[assignment]
        bound = copy.copy(self.call.arguments)
        bound.arguments = {n: values[n].clone() if n in values and n in self.region.inputs else given.get(n, v)
                           for n, v in bound.arguments.items()}  # fmt: skip
        parameters = {name: values[name] for name in self.region.params}
        out = functional_call(module, parameters, bound.args, bound.kwargs, tie_weights=False)
        leave |= {f"output {i}": x for i, x in enumerate(_tuple(self.region, out)) if isinstance(x, Tensor)}
        if missing := self.leave.keys() - leave.keys():
            raise RuntimeError(f"no {', '.join(sorted(missing))}: the part took another way through the code")
        return leave

    def supplied(self, cut: Cut, k: int) -> list[dict[str, Any]]:
        """Per part: indices of its slice of a name, exchanges over a name."""
        parts: list[dict[str, Any]] = [{} for _ in range(k)]
        for name, spec in self.given.items():
            (dim,) = spec.names
            exchange = _Exchange(k)
            for i, part in enumerate(parts):
                if spec.kind == "index":
                    every = torch.arange(self.sizes[dim])
                    part[name] = every.chunk(k)[i] if dim in cut else every
                else:
                    part[name] = _PartOf(exchange, i) if dim in cut else Whole()
        return parts

    # The law

    def reproduced(self) -> list[Fault]:
        """Whether the region alone, with its indices supplied, gives what it gave in the model without them."""
        return [Fault(n, e) for n, x in self.leave.items() if not (e := _error([self.whole[n]], "copies", 0, x)) < TOLERANCE]

    def faults(self, cut: Cut, k: int, specs: Specs) -> list[Fault]:
        """Every tensor on which k parts disagree with the whole."""
        try:
            where = self._where(cut, specs)
            split = {n: self._split(x, VALUES, *where[n], k) for n, x in self.enter.items()}
            parts = [_leaves({n: pieces[i] for n, pieces in split.items()}) for i in range(k)]
            leave = self._run_parts(parts, self.supplied(cut, k), "reduce" in {
                spec.kind for spec in self.given.values() if cut.intersection(spec.names)})
            found = [Fault(n, e) for n, x in self.whole.items()
                     if not (e := _error([part[n] for part in leave], VALUES[where[n][0]], where[n][1], x)) < TOLERANCE]
            cotangents = {n: self._split(x, GRADIENTS, *where[n], k) for n, x in self.cotangents.items()}
            grads = [_backward(out, part, {n: pieces[i] for n, pieces in cotangents.items()})
                     for i, (part, out) in enumerate(zip(parts, leave, strict=True))]
        except Exception as error:  # whatever the region's code raises on a part
            return [Fault("code", math.inf, f"{type(error).__name__}: {error}".split("\n")[0])]
        found += [Fault(f"grad {n}", e) for n, x in self.grads.items()
                  if not (e := _error([part[n] for part in grads], GRADIENTS[where[n][0]], where[n][1], x)) < TOLERANCE]
        return found

    def _where(self, cut: Cut, specs: Specs) -> dict[str, tuple[str, int]]:
        """State of each tensor, and the dim that is cut."""
        floats = [spec for spec in specs.values() if spec.kind == "float"]
        live = any(cut.intersection((*spec.names, *spec.sums)) for spec in floats)
        where = {}
        for label, spec in specs.items():
            dims = [i for i, names in enumerate(spec.dims) if cut.intersection(names)]
            if len(dims) > 1 or any(cut.intersection(spec.dims[i][1:]) for i in dims):
                raise ValueError(f"'{spec}' of {label} can be cut by the first name of one dim only")
            if dims:
                where[label] = ("S", dims[0])
            elif cut.intersection(spec.sums):
                where[label] = ("P", 0)
            else:
                where[label] = ("R" if live and not spec.whole else "I", 0)
        return where

    def _split(self, x: Tensor, table: Mapping[str, str], state: str, dim: int, k: int) -> list[Tensor]:
        how = table[state]
        if how == "slices":
            return [*x.chunk(k, dim)]
        if how == "copies":
            return [x] * k
        some = [self._randn(x) for _ in range(k - 1)]
        return [*some, x - sum(some)]

    def _randn(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.generator, dtype=x.dtype)

    def _run_parts(self, parts: list[Tensors], given: list[dict[str, Any]], together: bool) -> list[Tensors]:
        """Parts that exchange run in threads; the others one after another, which is faster."""
        if not together:
            return [self.run(part, supplied) for part, supplied in zip(parts, given, strict=True)]
        out: list[Any] = [None] * len(parts)

        def work(i: int) -> None:
            try:
                out[i] = self.run(parts[i], given[i])
            except Exception as error:
                out[i] = error
                for value in given[i].values():
                    if isinstance(value, _PartOf):
                        value.exchange.barrier.abort()  # nobody waits for a part that failed

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [x for x in out if isinstance(x, Exception)]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return out


class _Stub:
    """Stands for an inner region: notes what it takes, gives what is recorded."""

    def __init__(self, module: nn.Module, calls: list[tuple[str, Call]], values: Tensors, leave: Tensors) -> None:
        self.bind, self.region = bind(module.forward), signature(module)
        self.calls, self.values, self.leave = iter(calls), values, leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        label, call = next(self.calls)
        arguments = self.bind(*args, **kwargs).arguments
        self.leave |= {f"{label}.{n}": x.clone() for n in self.region.inputs if isinstance(x := arguments.get(n), Tensor)}
        names = [f"{label} output {i}" for i in range(len(call.outputs))]
        out = tuple(self.values[n].clone() if n in self.values else x for n, x in zip(names, call.outputs, strict=True))
        return out[0] if self.region.single else out


class _Exchange:
    """Where the parts of a name meet."""

    def __init__(self, k: int) -> None:
        self.barrier, self.slots = threading.Barrier(k, timeout=EXCHANGE_SECONDS), [torch.empty(0)] * k

    def all(self, i: int, x: Tensor) -> Tensor:
        self.slots[i] = x.detach()
        self.barrier.wait()
        every = torch.stack(self.slots)
        self.barrier.wait()  # nobody puts the next value before all have read this one
        return every


class _PartOf:
    """One part's side of an exchange: the `Parts` of a region."""

    def __init__(self, exchange: _Exchange, i: int) -> None:
        self.exchange, self.i = exchange, i

    def sum(self, x: Tensor, dims: str) -> Tensor:
        return self.exchange.all(self.i, x).sum(0)

    def max(self, x: Tensor, dims: str) -> Tensor:
        return self.exchange.all(self.i, x).amax(0)


def _leaves(values: Tensors) -> Tensors:
    return {n: x.detach().clone().requires_grad_(x.is_floating_point()) for n, x in values.items()}


def _backward(leave: Tensors, leaves: Tensors, cotangents: Tensors) -> Tensors:
    """Gradients of the floating-point leaves; zeros where nothing flows."""
    out = [n for n, x in leave.items() if x.requires_grad]
    into = [n for n, x in leaves.items() if x.requires_grad]
    grads: Any = [None] * len(into)
    if out and into:
        grads = torch.autograd.grad([leave[n] for n in out], [leaves[n] for n in into], [cotangents[n] for n in out],
                                    allow_unused=True)
    return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(into, grads, strict=True)}


def _error(parts: list[Tensor], how: str, dim: int, whole: Tensor) -> float:
    """How far the parts are from the whole, relative to its largest element (absolute if that is zero)."""
    if how == "slices":
        joined = [torch.cat([*parts], dim)] if parts[0].ndim else parts
    elif how == "addends":
        joined = [torch.stack([*parts]).sum(0)]
    else:
        joined = parts
    if any(x.shape != whole.shape for x in joined):
        return math.inf
    if not whole.numel():
        return 0.0
    scale = whole.abs().max().item()
    error = max((x.detach() - whole.detach()).abs().max().item() for x in joined)
    return error / scale if scale > 1e-12 else error
