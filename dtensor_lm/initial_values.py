"""Initial values as a pure function of (seed, parameter name, draw number, global index).

A model is built on the meta device while every operation that gives a parameter its values is recorded; the
record of one parameter is its `Recipe`. `draw` replays a recipe for any box of the global tensor: an element
depends on its own index only, so a rank draws just its shard and all meshes start from bitwise equal values.

    model = abstract(lambda: nn.Linear(4, 3))
    rows = draw(recipes(model)["weight"], "weight", 0, (3, 4), [(1, 3), (0, 4)], torch.float32)   # (2, 4)

What cannot be replayed element by element (`copy_`, `nn.init.orthogonal_`, a write to a slice) is refused by
name, never guessed. The one thing that cannot be seen is a model that asks `tensor.is_meta` itself and then
skips its own initialiser.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_lm.errors import ModelError

Box = Sequence[tuple[int, int]]
Span = tuple[int, int, int]
FIX = (
    "initialise all of it in place (nn.init.normal_, uniform_, trunc_normal_, constant_), or load its values"
)


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


# ---- what is understood: aten name -> (op, names of its numbers) -------------------------------------------

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
_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_COPIES = {"clone", "_to_copy"}
_MAPS: dict[str, tuple[str, ...]] = {
    "mul": ("other",), "div": ("other",), "add": ("other", "alpha"), "sub": ("other", "alpha"),
    "rsub": ("other", "alpha"), "pow": ("exponent",), "clamp": ("min", "max"), "clamp_min": ("min",),
    "clamp_max": ("max",),
    **dict.fromkeys(("neg", "reciprocal", "erfinv", "exp", "log", "sqrt", "sigmoid", "tanh"), ()),
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _MAPS},
    "add": lambda x, other, alpha: x + alpha * other,
    "sub": lambda x, other, alpha: x - alpha * other,
    "rsub": lambda x, other, alpha: other - alpha * x,
}


def _understood(name: str, bound: dict[str, Any]) -> Op | None:
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


def _wrong_dtype(op: Op, dtype: torch.dtype) -> str | None:
    if dtype.is_floating_point or (op.name == "fill" and not dtype.is_complex):
        return None
    return f"{op.name} in {dtype} cannot be replayed (values are computed in float64)"


def _outside_range(op: Op) -> str | None:
    if op.name != "trunc_normal":
        return None
    mean, std, low, high = _numbers(op)
    if std > 0 and _masses(mean, std, low, high)[1] > 1e-12:
        return None
    return f"nn.init.trunc_normal_ with mean {mean:g}, std {std:g} has no values between {low:g} and {high:g}"


# ---- recording ---------------------------------------------------------------------------------------------


@dataclass
class _History:
    """What happened to one storage, whose first tensor had `numel` elements of `dtype`.

    It holds the storage: the id of a freed one would come back for another tensor.
    """

    storage: torch.UntypedStorage
    numel: int
    dtype: torch.dtype
    ops: tuple[Op, ...] = ()
    refusal: str | None = None
    draw: int | None = None  # which random draw of the whole build the values come from

    @classmethod
    def born(cls, tensor: Tensor, refusal: str | None = None) -> _History:
        return cls(tensor.untyped_storage(), tensor.numel(), tensor.dtype, refusal=refusal)

    def covered_by(self, view: Tensor) -> bool:
        """Whether `view` holds each element of the storage exactly once, as elements of the same dtype."""
        if view.numel() != self.numel or view.dtype != self.dtype:
            return False
        dense = 1
        for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
            if size > 1 and stride != dense:
                return view.numel() == 0
            dense *= size
        return True


class _Recorder(TorchDispatchMode):
    """Keeps a history for every storage on the meta device; all its views share it."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: dict[int, _History] = {}
        self.draws = itertools.count()

    def of(self, tensor: Tensor) -> _History:
        """The history of `tensor`'s storage; refused if the storage appeared without a recorded operation."""
        unseen = "its values are given as data (torch.tensor, numpy, an outer tensor), and meta keeps no data"
        return self.histories.setdefault(tensor.untyped_storage()._cdata, _History.born(tensor, unseen))

    def apply(self, history: _History, op: Op, before: _History) -> None:
        """Set `history` to the result of `op`; a map starts from `before` (may be `history`)."""
        refusal = _outside_range(op) or _wrong_dtype(op, history.dtype)
        if op.name in _FUNCTIONS:
            refusal = before.refusal or refusal
            history.ops, history.draw = (*before.ops, op), before.draw
        else:
            history.ops, history.draw = (op,), None if op.name == "fill" else next(self.draws)
        history.refusal = refusal

    def write(self, tensor: Tensor, op: Op | None, by: str) -> None:
        """An operation wrote to `tensor` in place."""
        history = self.of(tensor)
        if op is None:
            history.refusal = f"{by} cannot be replayed element by element"
        elif not history.covered_by(tensor):
            history.refusal = f"{by} writes only a part of it (a view or a slice)"
        else:
            self.apply(history, op, history)

    def create(self, result: Tensor, name: str, op: Op | None, origin: Any) -> None:
        """An operation returned `result` in a new storage; `origin` is its argument `self`, if it has one."""
        history = self.histories[result.untyped_storage()._cdata] = _History.born(result)
        before = self.of(origin) if isinstance(origin, Tensor) and origin.is_meta else None
        if name in _EMPTY:
            history.refusal = f"{name} leaves it without values, and nothing writes them"
        elif op is not None and op.name not in _FUNCTIONS:
            self.apply(history, op, history)
        elif before is None or (op is None and name not in _COPIES):
            history.refusal = f"{name} cannot be replayed element by element"
        elif not before.covered_by(origin):
            history.refusal = f"{name} takes only a part of another tensor (a view or a slice)"
        elif op is not None:
            self.apply(history, op, before)
        else:
            history.ops, history.refusal, history.draw = before.ops, before.refusal, before.draw
            if not result.is_floating_point() and result.dtype != before.dtype:
                history.refusal = history.refusal or f"it is converted to {result.dtype}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        results = func(*args, **kwargs)
        bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        bound |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        name = schema.name.removeprefix("aten::")
        op = _understood(name, bound)
        given = set()
        for argument in schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _meta_tensors(bound.get(argument.name)):
                given.add(tensor.untyped_storage()._cdata)
                if written:
                    self.write(tensor, op if argument.name == "self" else None, name)
        for result in _meta_tensors(results):
            if result.untyped_storage()._cdata not in given:
                self.create(result, name, op, bound.get("self"))
        return results


class _InitWatch(TorchFunctionMode):
    """Sees the initialisers of torch.nn.init that do nothing on the meta device, and hence record nothing.

    They betray themselves by reading `tensor.is_meta` (in torch 2.13: trunc_normal_, orthogonal_, sparse_ and
    dirac_). Watching that read, not replacing the functions, also catches `from torch.nn.init import ...`.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_meta.__get__ and args[0].is_meta:  # type: ignore[attr-defined]
            frame = sys._getframe(1)
            while frame.f_back and frame.f_globals.get("__name__") in (
                "torch.utils._device",
                "torch.overrides",
            ):
                frame = frame.f_back
            if frame.f_globals.get("__name__") == "torch.nn.init":
                known, by = frame.f_locals, frame.f_code.co_name.removeprefix("_no_grad_")
                wanted = ("mean", "std", "a", "b")
                op = None
                if by == "trunc_normal_" and all(isinstance(known.get(n), int | float) for n in wanted):
                    op = Op("trunc_normal", tuple(float(known[n]) for n in wanted))
                self.recorder.write(args[0], op, f"nn.init.{by}")
        return func(*args, **(kwargs or {}))


def _meta_tensors(value: Any) -> Iterator[Tensor]:
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, Tensor) and item.is_meta:
            yield item


def abstract(build: Callable[[], nn.Module]) -> nn.Module:
    """Run `build` on the meta device and attach the recipe of every parameter and buffer to the module.

    Nothing is refused here: `recipes` does that, so that a model whose values are loaded can still be built.
    """
    recorder = _Recorder()
    with torch.device("meta"), recorder, _InitWatch(recorder):
        model = build()
    if not isinstance(model, nn.Module):
        raise ModelError(f"abstract(build): build returned a {type(model).__name__}, not an nn.Module")
    found: dict[str, Recipe] = {}
    storages: dict[int, str] = {}
    draws: dict[int, str] = {}
    for name, tensor in _tensors(model).items():
        if is_lazy(tensor) or not tensor.is_meta:
            where = (
                "in a lazy module, without a shape" if is_lazy(tensor) else f"on {tensor.device}, not on meta"
            )
            found[name] = Recipe(refusal=f"it was created {where}")
            continue
        history = recorder.of(tensor)
        refusal = history.refusal
        owner = storages.setdefault(tensor.untyped_storage()._cdata, name)
        source = name if history.draw is None else draws.setdefault(history.draw, name)
        if owner != name:
            refusal = f"it shares the memory of {owner} without being the same parameter"
        elif not history.covered_by(tensor):
            refusal = "it is only a part of another tensor (a view or a slice)"
        elif source != name:
            refusal = refusal or f"it copies the random values of {source}"
        found[name] = Recipe(refusal=refusal) if refusal else Recipe(history.ops)
    model._recipes = found  # type: ignore[assignment]
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, by canonical name: of a tied tensor only the first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def recipes(model: nn.Module) -> dict[str, Recipe]:
    """The recipe of every parameter and buffer of a model that `abstract` built, by canonical name.

    Raises ModelError that lists all parameters and buffers whose values cannot be replayed, with the reason.
    """
    known = getattr(model, "_recipes", None)
    if not isinstance(known, dict):
        raise ModelError(
            f"{type(model).__name__} has no recorded initial values", ["build it by abstract(...)"]
        )
    parameters = dict(model.named_parameters())
    late = Recipe(refusal="it was added after abstract(...)")
    found = {name: known.get(name, late) for name in _tensors(model)}
    faults = [
        f"{'parameter' if name in parameters else 'buffer'} {name}: {recipe.refusal}; {FIX}"
        for name, recipe in found.items()
        if recipe.refusal
    ]
    if faults:
        raise ModelError(f"{type(model).__name__} has initial values that cannot be reproduced", faults)
    return found


# ---- drawing -----------------------------------------------------------------------------------------------

_SLAB = {"cpu": 1 << 16}  # elements at once: a slab of int64 and its scratch stay in a core's cache
_SLAB_ON_DEVICE = 1 << 20  # enough to hide the launch of a kernel, 8 MiB per temporary


def draw(
    recipe: Recipe,
    name: str,
    seed: int,
    shape: Sequence[int],
    box: Box,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The values of `box` = (start, stop) per dim of the global tensor `name` with `shape`; shape of the box.

    Computed in float64, in slabs of bounded size, then rounded once to `dtype`. On one kind of device an
    element is bitwise the same whatever the box, the number of threads and the mesh. CPU and GPU share the
    uniform bits, but their erfinv may differ in the last bits of float64, before that rounding.

    Raises ModelError if the recipe is refused, ValueError if the box is not inside the shape.
    """
    if recipe.refusal or not recipe.ops:
        raise ModelError(
            "Initial values that cannot be reproduced", [f"{name}: {recipe.refusal or 'no ops'}"]
        )
    if len(box) != len(shape) or not all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)):
        raise ValueError(f"{name}: box {list(box)} is not inside shape {tuple(shape)}")
    device = torch.device(device)
    result = torch.empty([stop - start for start, stop in box], dtype=dtype, device=device)
    sources = [place for place, op in enumerate(recipe.ops) if op.name not in _FUNCTIONS]
    source, maps = recipe.ops[sources[-1]], recipe.ops[sources[-1] + 1 :]
    if source.name == "fill":
        value = torch.full((), *_numbers(source), dtype=torch.float64, device="cpu")
        return result.fill_(_mapped(value, maps).to(dtype).item())
    draws_before = sum(recipe.ops[place].name != "fill" for place in sources[:-1])
    keys = _keys(seed, name, draws_before)
    for part, spans in _slabs(result, shape, box):
        part.copy_(_mapped(_sample(source, _uniform(spans, keys, device)), maps))
    return result


def _mapped(x: Tensor, maps: Sequence[Op]) -> Tensor:
    for op in maps:
        x = _FUNCTIONS[op.name](x, *op.numbers)
    return x


def _sample(op: Op, uniform: Tensor) -> Tensor:
    """Turn uniforms of (0, 1) into the distribution of `op` by the inverse of its distribution function."""
    if op.name == "uniform":
        low, high = _numbers(op)
        return uniform.mul_(high - low).add_(low)
    if op.name == "normal":
        mean, std = _numbers(op)
        return uniform.mul_(2).sub_(1).erfinv_().mul_(std * math.sqrt(2)).add_(mean)
    mean, std, low, high = _numbers(op)
    below, inside = _masses(mean, std, low, high)
    x = uniform.mul_(2 * inside).add_(2 * below - 1).erfinv_()
    return x.mul_(std * math.sqrt(2)).add_(mean).clamp_(low, high)


def _masses(mean: float, std: float, low: float, high: float) -> tuple[float, float]:
    """How much of the normal distribution lies below `low`, and how much between `low` and `high`."""
    below, upto = (math.erfc((mean - bound) / (std * math.sqrt(2))) / 2 for bound in (low, high))
    return below, upto - below


def _numbers(op: Op) -> list[float]:
    return [number for number in op.numbers if number is not None]


def _slabs(result: Tensor, shape: Sequence[int], box: Box) -> Iterator[tuple[Tensor, list[Span]]]:
    """Cut `result` into contiguous parts of bounded size, each with the spans of its global linear index.

    A span (first, stride, count) is first + stride * [0 .. count); the row-major index of an element is the
    sum of the spans over the dims of the part.
    """
    if result.numel() == 0:
        return
    limit = _SLAB.get(result.device.type, _SLAB_ON_DEVICE)
    # Dims that the box takes whole are one run of consecutive indices with the dim before them.
    sizes, runs = [1], [(0, 1)]
    for n, (start, stop) in zip(shape, box, strict=True):
        if (start, stop) == (0, n):
            sizes[-1], runs[-1] = sizes[-1] * n, (runs[-1][0] * n, runs[-1][1] * n)
        else:
            sizes.append(n)
            runs.append((start, stop))
    local = [stop - start for start, stop in runs]
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    cut = next(dim for dim in range(len(local)) if math.prod(local[dim + 1 :]) <= limit)
    inner = math.prod(local[cut + 1 :])
    step = -(-local[cut] // -(-local[cut] * inner // limit))
    view = result.view(local)
    for outer in itertools.product(*map(range, local[:cut])):
        base = sum((runs[dim][0] + i) * strides[dim] for dim, i in enumerate(outer))
        for first in range(0, local[cut], step):
            rows = min(step, local[cut] - first)
            spans = [(base + (runs[cut][0] + first) * strides[cut], strides[cut], rows)]
            spans += [
                (runs[dim][0] * strides[dim], strides[dim], local[dim]) for dim in range(cut + 1, len(local))
            ]
            yield view[outer][first : first + rows], spans


# SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014): the increment
# and the two rounds (shift, multiplier) of its finaliser.
_STEP, _ROUNDS, _LAST = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31


def _keys(seed: int, name: str, draw_number: int) -> tuple[int, int]:
    """Two 64-bit keys of one stream. Streams of other seeds, names and draw numbers are independent."""
    digest = hashlib.blake2b(f"{seed}/{draw_number}/{name}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _uniform(spans: Sequence[Span], keys: tuple[int, int], device: torch.device) -> Tensor:
    """float64 in (0, 1), one dim per span: SplitMix64 of the linear index, hashed twice with a key for each.

    One round alone would make two streams windows of the same sequence; the second key tells them apart.
    """
    z = torch.full((), _signed(keys[0]), dtype=torch.int64, device=device)
    for first, stride, count in spans:
        # The multiplication of the index by SplitMix64's increment is done per dim: int64 wraps at 2^64.
        line = torch.arange(count, device=device).mul_(_signed(stride * _STEP)).add_(_signed(first * _STEP))
        z = z.unsqueeze(-1) + line
    scratch = torch.empty_like(z)
    _scramble(z, scratch)
    z.bitwise_xor_(_signed(keys[1]))
    _scramble(z, scratch)
    # 52 bits and a half: exact in float64 and never 0 or 1, whose normal would be infinite.
    z.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return z.double().add_(0.5).mul_(2.0**-52)


def _scramble(z: Tensor, scratch: Tensor) -> None:
    """SplitMix64's finaliser in place; the mask undoes the sign that int64 shifts in."""
    for shift, multiplier in (*_ROUNDS, (_LAST, 1)):
        torch.bitwise_right_shift(z, shift, out=scratch)
        z.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier != 1:
            z.mul_(_signed(multiplier))


def _signed(word: int) -> int:
    """The int64 with the low 64 bits of `word`."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
