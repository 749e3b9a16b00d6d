"""One region taken out of a model, run whole and in parts: the law of regions in numbers.

Tensors that enter a region are its inputs, its parameters and what regions inside it gave; those that leave
are its outputs and what regions inside it took. Inner regions are replaced by the record of one run of the
whole model, so the region is a function of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dtensor_lm.errors import ModelError
from dtensor_lm.ops.dropout import Random, Site
from dtensor_lm.ops.parts import Whole
from dtensor_lm.region import SUPPLIED, TensorSpec, bind, factors, signature
from dtensor_lm.testing.exchange import Exchange, in_threads
from dtensor_lm.testing.recording import MOMENT, Call, outputs_of

TOLERANCE = 1e-9

# What k parts hold of the values and of the gradients of a tensor, by its state: S the cut goes through one
# of its dims, P they sum to it, R they are equal, I they are equal and nothing behind them knows of the cut.
# A parameter marked +n enters whole into part 0 and as zeros into the others; what is lawful for that is
# linear in it, so lawful for any addends, which are what is tried here and what inner regions give.
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


class Piece:
    """A region and the tensors that enter and leave it: values and specs (in its own names) by label."""

    def __init__(self, call: Call, generator: torch.Generator) -> None:
        self.call, self.region, self.generator = call, signature(call.module), generator
        self.specs: dict[str, TensorSpec] = {}
        self.enter: Tensors = {}
        self.leave: Tensors = {}
        self.inner: dict[str, list[tuple[str, Call]]] = {}  # path below the region -> (label, call)
        self.given: dict[str, TensorSpec] = {}  # what the framework supplies
        self.parameters: dict[str, str] = {}  # path below the region -> label
        for name, crossing in self.region.inputs.items():
            value = call.arguments.arguments.get(name)
            self._add(self.enter, name, crossing.inner, value)
            if crossing.inner.kind in SUPPLIED and not isinstance(value, Tensor):
                self.given[name] = crossing.inner
        for name, spec in self.region.params.items():
            self.parameters[name] = label = f"parameter {name}" if name in self.region.inputs else name
            self._add(self.enter, label, spec, call.module.get_parameter(name).detach())
        for i, crossing in enumerate(self.region.outputs):
            self._add(self.leave, f"output {i}", crossing.inner, call.outputs[i])
        paths = {id(m): path for path, m in call.module.named_modules()}
        for one in call.inner:
            if id(one.module) not in paths:
                raise ModelError(f"{one.path} is called by {call.path or 'the model'} from outside")
            calls = self.inner.setdefault(paths[id(one.module)], [])
            label = f"inner {paths[id(one.module)]}" + (f" (call {len(calls) + 1})" if calls else "")
            calls.append((label, one))
            for name, crossing in signature(one.module).inputs.items():
                self._add(self.leave, f"{label}.{name}", crossing.outer, one.arguments.arguments.get(name))
            for i, crossing in enumerate(signature(one.module).outputs):
                self._add(self.enter, f"{label} output {i}", crossing.outer, one.outputs[i])
        self.sizes = self._sizes()
        leaves = _leaves(self.enter)
        try:
            self.whole = self.run(leaves, self.supplied(frozenset(), 1, Exchange(1))[0])
        except Exception as error:  # whatever the region's code raises
            raise ModelError(
                f"{call.path or 'the model'} cannot run alone:", [f"{type(error).__name__}: {error}"]
            ) from error
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
                shape = [*value.shape]
                faults.append(f"{label}: signature '{spec}' has {len(spec.dims)} dims, the tensor {shape}")
                continue
            for names, size in zip(spec.dims, value.shape, strict=True):
                try:
                    found = factors(self.call.module, names, size) if names != ("_",) else {}
                except ValueError as error:
                    faults.append(f"{label}: {error}")
                    continue
                faults += [f"{label}: {n} has size {v} here and {sizes[n]} elsewhere in the region"
                           for n, v in found.items() if sizes.setdefault(n, v) != v]  # fmt: skip
        faults += [f"{n}: no tensor has the name {name!r}"
                   for n, s in self.given.items() for name in s.names if name not in sizes]  # fmt: skip
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
        """What leaves the region, from what enters it. A copy of the module runs: parts may run at once."""
        leave: Tensors = {}
        memo: dict[int, Any] = {id(p): p for p in self.call.module.parameters()}
        for calls in self.inner.values():
            original = calls[0][1].module
            memo[id(original)] = inner = copy.copy(original)
            inner.forward = _Stub(original, calls, values, leave)
        module = copy.deepcopy(self.call.module, memo)
        bound = copy.copy(self.call.arguments)
        bound.arguments = {
            name: values[name].clone() if isinstance(value, Tensor) else given.get(name, value)
            for name, value in bound.arguments.items()
        }
        parameters = {name: values[label] for name, label in self.parameters.items()}
        out = functional_call(module, parameters, bound.args, bound.kwargs, tie_weights=False)
        values_out = outputs_of(self.region, out)
        leave |= {f"output {i}": x for i, x in enumerate(values_out) if isinstance(x, Tensor)}
        if missing := self.leave.keys() - leave.keys():
            raise RuntimeError(f"no {', '.join(sorted(missing))}: the part took another way through the code")
        return leave

    def supplied(self, cut: Cut, k: int, exchange: Exchange) -> list[dict[str, Any]]:
        """Per part: the indices of its slice of a name, its side of the exchange over one, its random numbers."""
        parts: list[dict[str, Any]] = [{} for _ in range(k)]
        for name, spec in self.given.items():
            dim = spec.names[0]
            for i, part in enumerate(parts):
                if spec.kind == "index":
                    every = torch.arange(self.sizes[dim])
                    part[name] = every.chunk(k)[i] if dim in cut else every
                elif spec.kind == "reduce":
                    part[name] = exchange.part(i) if dim in cut else Whole()
                else:
                    part[name] = self._random(name, spec, cut, k, i)
        return parts

    def _random(self, name: str, spec: TensorSpec, cut: Cut, k: int, i: int) -> Random:
        whole = [math.prod(self.sizes[n] for n in names) for names in spec.dims]
        box = [
            (i * size // k, (i + 1) * size // k) if cut.intersection(names) else (0, size)
            for names, size in zip(spec.dims, whole, strict=True)
        ]
        return Site(f"{self.call.path}.{name}", whole, box).at(MOMENT)

    # The law

    def reproduced(self) -> list[Fault]:
        """Where the region alone, with its indices supplied, differs from what it gave in the model."""
        how = dict.fromkeys(self.leave, "copies")
        return _faults(how, {}, {n: [self.whole[n]] for n in self.leave}, self.leave)

    def faults(self, cut: Cut, k: int, specs: Specs) -> list[Fault]:
        """Every tensor on which k parts disagree with the whole."""
        try:
            states, dims = self._states(cut, specs)
            values = {n: VALUES[state] for n, state in states.items()}
            gradients = {n: GRADIENTS[state] for n, state in states.items()}
            parts = [_leaves(part) for part in self._split(self.enter, values, dims, k)]
            out = self._run_parts(parts, cut)
            found = _faults(values, dims, {n: [part[n] for part in out] for n in self.whole}, self.whole)
            if any(fault.error == math.inf for fault in found):
                return found  # no cotangent fits
            cotangents = self._split(self.cotangents, gradients, dims, k)
            grads = [_backward(*each) for each in zip(out, parts, cotangents, strict=True)]
            by_label = {n: [part[n] for part in grads] for n in self.grads}
            return found + _faults(gradients, dims, by_label, self.grads, "grad ")
        except Exception as error:  # whatever the region's code raises on a part
            return [Fault("code", math.inf, f"{type(error).__name__}: {error}".split("\n")[0])]

    def _states(self, cut: Cut, specs: Specs) -> tuple[dict[str, str], dict[str, int]]:
        """By label: the state of each tensor, and the dim that is cut."""
        floats = [spec for spec in specs.values() if spec.kind == "float"]
        live = any(cut.intersection((*spec.names, *spec.sums)) for spec in floats)
        states, dims = {}, {}
        for label, spec in specs.items():
            found = [i for i, names in enumerate(spec.dims) if cut.intersection(names)]
            if len(found) > 1 or any(cut.intersection(spec.dims[i][1:]) for i in found):
                raise ValueError(f"'{spec}' of {label} can be cut by the first name of one dim only")
            if found:
                states[label], dims[label] = "S", found[0]
            elif cut.intersection(spec.sums):
                states[label] = "P"
            else:
                states[label] = "R" if live and not spec.whole else "I"
        return states, dims

    def _split(self, whole: Tensors, how: dict[str, str], dims: dict[str, int], k: int) -> list[Tensors]:
        parts: list[Tensors] = [{} for _ in range(k)]
        for label, x in whole.items():
            pieces = [x] * k
            if how[label] == "slices":
                pieces = [*x.chunk(k, dims[label])]
            elif how[label] == "addends":
                some = [self._randn(x) for _ in range(k - 1)]
                pieces = [*some, x - sum(some)]
            for part, piece in zip(parts, pieces, strict=True):
                part[label] = piece
        return parts

    def _randn(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.generator, dtype=x.dtype)

    def _run_parts(self, parts: list[Tensors], cut: Cut) -> list[Tensors]:
        """Parts that exchange run in threads; the others one after another, which is faster."""
        exchange = Exchange(len(parts))
        given = self.supplied(cut, len(parts), exchange)
        runs = [partial(self.run, *each) for each in zip(parts, given, strict=True)]
        together = any(spec.kind == "reduce" and cut.intersection(spec.names) for spec in self.given.values())
        return in_threads(runs, exchange) if together else [run() for run in runs]


class _Stub:
    """Stands for an inner region: notes what it takes, gives what is recorded."""

    def __init__(self, module: nn.Module, calls: list[tuple[str, Call]], values: Tensors, leave: Tensors) -> None:
        self.bind, self.region = bind(module.forward), signature(module)
        self.calls, self.values, self.leave = iter(calls), values, leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        label, call = next(self.calls)
        arguments = self.bind(*args, **kwargs).arguments
        took = {f"{label}.{name}": arguments.get(name) for name in self.region.inputs}
        self.leave |= {name: x.clone() for name, x in took.items() if isinstance(x, Tensor)}
        out = tuple(
            self.values[f"{label} output {i}"].clone() if isinstance(x, Tensor) else x
            for i, x in enumerate(call.outputs)
        )
        return out[0] if self.region.single else out


def _leaves(values: Tensors) -> Tensors:
    return {n: x.detach().clone().requires_grad_(x.is_floating_point()) for n, x in values.items()}


def _backward(leave: Tensors, leaves: Tensors, cotangents: Tensors) -> Tensors:
    """Gradients of the floating-point leaves; zeros where nothing flows."""
    out = [n for n, x in leave.items() if n in cotangents and x.requires_grad]
    into = [n for n, x in leaves.items() if x.requires_grad]
    grads: Any = [None] * len(into)
    if out and into:
        ends, starts, given = [leave[n] for n in out], [leaves[n] for n in into], [cotangents[n] for n in out]
        grads = torch.autograd.grad(ends, starts, given, allow_unused=True)
    return {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(into, grads, strict=True)}


def _faults(
    how: dict[str, str], dims: dict[str, int], parts: dict[str, list[Tensor]], whole: Tensors, what: str = ""
) -> list[Fault]:
    """Where parts do not make the whole."""
    errors = {n: _error(parts[n], how[n], dims.get(n, 0), x) for n, x in whole.items()}
    return [Fault(f"{what}{n}", error) for n, error in errors.items() if not error < TOLERANCE]  # NaN is one


def _error(parts: list[Tensor], how: str, dim: int, whole: Tensor) -> float:
    """How far the parts are from the whole, relative to its largest element (absolute if that is zero)."""
    joined, whole = [x.detach().double() for x in parts], whole.detach().double()
    if how == "slices" and all(x.ndim == whole.ndim for x in joined):
        joined = [torch.cat(joined, dim)]
    elif how == "addends":
        joined = [torch.stack(joined).sum(0)]
    if any(x.shape != whole.shape for x in joined):
        return math.inf
    if not whole.numel():
        return 0.0
    scale = whole.abs().max().item()
    error = torch.stack([(x - whole).abs().max() for x in joined]).max().item()
    return error / scale if not scale <= 1e-12 else error
