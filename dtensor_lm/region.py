"""Signatures of regions: which names the tensors of a module have, what it sums over, and what may be cut.

Notation of one tensor:

    batch seq embed            three dims by name
    (heads head_dim) embed     a fused dim: heads are divided, never head_dim's rows
    batch seq embed +heads     addends over `heads`: the values on the parts sum to the tensor
    +batch +seq =              a scalar, addends over batch and seq; equal and whole (state I) on all others
    int batch seq              an integer tensor: no gradient, no say in which axes are live
    index vocab                supplied by the framework: the global indices of this part's slice of `vocab`
    reduce vocab               supplied by the framework: sums and maxima over the parts of `vocab`
    random batch res embed     supplied by the framework: random numbers for a tensor of these dims (dropout)

An input reads `outer -> inner`, an output `inner -> outer`: outer names belong to the enclosing region. One
side alone stands for both.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtensor_lm.errors import ModelError

if TYPE_CHECKING:
    from torch import nn

_WORD = re.compile(r"\(([a-z0-9_ ]+)\)|(\+?[a-z_][a-z0-9_]*)|(=)")
KINDS = ("int", "index", "reduce", "random")
SUPPLIED = ("index", "reduce", "random")  # what the framework gives, not the caller


@dataclass(frozen=True)
class TensorSpec:
    """Names of one tensor: `dims` (each a tuple of fused names), names it is a sum over, and its marks."""

    dims: tuple[tuple[str, ...], ...]
    sums: tuple[str, ...] = ()
    whole: bool = False
    kind: str = "float"

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        dims: list[tuple[str, ...]] = []
        sums: list[str] = []
        whole, kind, at = False, "float", 0
        words = text.split(None, 1)
        if words and words[0] in KINDS:
            kind, text = words[0], words[1] if len(words) > 1 else ""
        while at < len(text):
            if text[at].isspace():
                at += 1
                continue
            match = _WORD.match(text, at)
            if not match:
                raise ValueError(f"cannot read {text[at:]!r}")
            at = match.end()
            fused, name, equals = match.groups()
            if equals:
                whole = True
            elif fused is not None:
                if not fused.strip():
                    raise ValueError("a fused dim without names")
                dims.append(tuple(fused.split()))
            elif name.startswith("+"):
                sums.append(name[1:])
            else:
                dims.append((name,))
        names = [name for dim in dims for name in dim if name != "_"]
        if len(set(names)) < len(names):
            raise ValueError("a name stands twice in one tensor")
        if len(set(sums)) < len(sums):
            raise ValueError("a name is summed over twice")
        if set(names) & set(sums):
            raise ValueError("a name is both a dim and summed over")
        if kind in ("index", "reduce") and len(names) != 1:
            raise ValueError(f"'{kind}' takes one name")
        if kind == "random" and (sums or whole or not names or ("_",) in dims):
            raise ValueError("'random' takes names of dims only")
        return cls(tuple(dims), tuple(sums), whole, kind)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dims ('_' stands for a dim without a name)."""
        return tuple(name for dim in self.dims for name in dim if name != "_")

    def __str__(self) -> str:
        words = [] if self.kind == "float" else [self.kind]
        words += [dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in self.dims]
        return " ".join([*words, *(f"+{name}" for name in self.sums), *(["="] if self.whole else [])])


@dataclass(frozen=True)
class Crossing:
    """A tensor on both sides of a region's border."""

    outer: TensorSpec
    inner: TensorSpec


class Region:
    """The signature of a module; stands beside its code as the class attribute `region`.

    inputs: names of forward's parameters -> `outer -> inner`.
    outputs: `inner -> outer`, one text or a tuple of them when forward returns a tuple.
    params: paths of parameters below the module -> names. A parameter marked `+n` enters as addends (a bias
        that is added inside a sum over n).
    cuts: names that may be cut here, separated by spaces; `a+b` is a bundle that one axis may cut together.
        The law of regions (`dtensor_lm.testing.check_regions`) proves each of them numerically.

    Raises `ModelError` with every unreadable text.
    """

    def __init__(
        self,
        inputs: Mapping[str, str],
        outputs: str | tuple[str, ...],
        params: Mapping[str, str] | None = None,
        cuts: str = "",
    ) -> None:
        faults: list[str] = []

        def read(where: str, text: str, outputs: bool = False) -> Crossing:
            sides = text.split("->")
            if len(sides) > 2:
                faults.append(f"{where}: {text!r} has more than one '->'")
            specs = []
            for side in sides[:2]:
                try:
                    specs.append(TensorSpec.parse(side.strip()))
                except ValueError as error:
                    faults.append(f"{where}: {text!r}: {error}")
                    specs.append(TensorSpec(()))
            left, right = specs[0], specs[-1]
            if left.kind != right.kind and len(specs) == 2:
                right = TensorSpec(right.dims, right.sums, right.whole, left.kind)
            return Crossing(right, left) if outputs else Crossing(left, right)

        self.inputs = {name: read(f"input {name}", text) for name, text in inputs.items()}
        self.single = isinstance(outputs, str)
        texts = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        self.outputs = tuple(read(f"output {i}", text, outputs=True) for i, text in enumerate(texts))
        self.params = {name: read(f"parameter {name}", text).inner for name, text in (params or {}).items()}
        self.cuts = frozenset(frozenset(cut.split("+")) for cut in cuts.split())
        if faults:
            raise ModelError("a region's signature cannot be read:", faults)

    def own_names(self) -> frozenset[str]:
        """Names of the region's own tensors, without those that only inner regions bring."""
        crossings = (*self.inputs.values(), *self.outputs)
        specs = [*(crossing.inner for crossing in crossings), *self.params.values()]
        return frozenset(name for spec in specs for name in (*spec.names, *spec.sums))

    def float_names(self) -> frozenset[str]:
        """Names that make an axis live: of floating-point tensors, and names that an output sums over."""
        crossings = [c.inner for c in self.inputs.values() if c.inner.kind == "float"]
        specs = [*crossings, *(c.inner for c in self.outputs), *self.params.values()]
        return frozenset(name for spec in specs for name in (*spec.names, *spec.sums))


def signature(module: nn.Module) -> Region:
    region = module.region
    assert isinstance(region, Region)
    return region


def is_region(module: nn.Module) -> bool:
    return isinstance(getattr(module, "region", None), Region)


def bind(function: Callable[..., Any]) -> Callable[..., inspect.BoundArguments]:
    """A binder of arguments to the names of forward's parameters, defaults included."""
    target = inspect.signature(function)

    def bound(*args: Any, **kwargs: Any) -> inspect.BoundArguments:
        arguments = target.bind(*args, **kwargs)
        arguments.apply_defaults()
        return arguments

    return bound


def factors(module: nn.Module, names: tuple[str, ...], size: int) -> dict[str, int]:
    """Sizes of the factors of a fused dim: all but one are attributes of the module with the factor's name."""
    known = {n: v for n in names if isinstance(v := getattr(module, n, None), int)}
    free = [n for n in names if n not in known]
    if len(names) == 1:
        return {names[0]: size}
    if len(free) > 1:
        raise ValueError(
            f"the fused dim ({' '.join(names)}) needs attributes for all but one of {', '.join(free)}: "
            f"set self.{free[-1]}"
        )
    product = 1
    for value in known.values():
        product *= value
    if size % product or (not free and size != product):
        raise ValueError(f"the fused dim ({' '.join(names)}) of {size} is no multiple of {product}")
    return {**known, **({free[0]: size // product} if free else {})}
