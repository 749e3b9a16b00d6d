"""Recipes: how one tensor gets its values, as a list of elementary operations, and what torch calls them.

A recipe has a source that overwrites (fill, uniform, normal, trunc_normal), then maps of every element, each
with plain numbers. What cannot be written so is no recipe: an element must depend on its own index only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Op:
    """One step: a source that overwrites (fill, uniform, normal, trunc_normal) or a map of every element."""

    name: str
    numbers: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """How one tensor gets its values: `ops` in order, or the `refusal`: why they cannot be replayed."""

    ops: tuple[Op, ...] = ()
    refusal: str | None = None


# What is understood: aten name -> (op, names of its numbers).
_FILLS = dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero_"), 0.0)
_FILLS |= dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0)
_SOURCES = {
    **dict.fromkeys(("full", "full_like", "new_full"), ("fill", ("fill_value",))),
    **dict.fromkeys(("fill_", "fill"), ("fill", ("value",))),
    **dict.fromkeys(("normal_", "normal"), ("normal", ("mean", "std"))),
    "scalar_tensor": ("fill", ("s",)),
    "uniform_": ("uniform", ("from", "to")),
}
_UNIT_DRAWS = {name: kind for kind in ("rand", "randn") for name in (kind, f"{kind}_like")}
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
COPIES = {"clone", "_to_copy"}
_MAPS: dict[str, tuple[str, ...]] = {
    "mul": ("other",), "div": ("other",), "add": ("other", "alpha"), "sub": ("other", "alpha"),
    "rsub": ("other", "alpha"), "pow": ("exponent",), "clamp": ("min", "max"), "clamp_min": ("min",),
    "clamp_max": ("max",),
    **dict.fromkeys(("neg", "reciprocal", "erfinv", "exp", "log", "sqrt", "sigmoid", "tanh"), ()),
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _MAPS},
    "add": lambda x, other, alpha: x + alpha * other,
    "sub": lambda x, other, alpha: x - alpha * other,
    "rsub": lambda x, other, alpha: other - alpha * x,
}


def understood(name: str, bound: dict[str, Any]) -> Op | None:
    """The op that aten's `name` with arguments `bound` stands for; None if not elementwise in scalars."""
    if name in _FILLS:
        return Op("fill", (_FILLS[name],))
    if name in _UNIT_DRAWS:
        return Op("uniform", (0.0, 1.0)) if _UNIT_DRAWS[name] == "rand" else Op("normal", (0.0, 1.0))
    kind, places = _SOURCES.get(name) or (name.removesuffix("_"), _MAPS.get(name.removesuffix("_")))
    if places is None or bound.get("rounding_mode") is not None:
        return None
    numbers = [bound.get(place) for place in places]
    if not all(n is None or isinstance(n, float) or (isinstance(n, int) and float(n) == n) for n in numbers):
        return None
    return Op(kind, tuple(None if number is None else float(number) for number in numbers))


def wrong_dtype(op: Op, dtype: torch.dtype) -> str | None:
    if dtype.is_floating_point or (op.name == "fill" and not dtype.is_complex):
        return None
    return f"{op.name} in {dtype} cannot be replayed (values are computed in float64)"


def outside_range(op: Op) -> str | None:
    if op.name != "trunc_normal":
        return None
    mean, std, low, high = numbers_of(op)
    if std > 0 and masses(mean, std, low, high)[1] > 1e-12:
        return None
    return f"nn.init.trunc_normal_ with mean {mean:g}, std {std:g} has no values between {low:g} and {high:g}"


def masses(mean: float, std: float, low: float, high: float) -> tuple[float, float]:
    """How much of the normal distribution lies below `low`, and how much between `low` and `high`."""
    below, upto = (math.erfc((mean - bound) / (std * math.sqrt(2))) / 2 for bound in (low, high))
    return below, upto - below


def numbers_of(op: Op) -> list[float]:
    return [number for number in op.numbers if number is not None]
