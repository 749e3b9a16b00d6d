"""Initial values as a pure function of (seed, parameter name, draw number, global index).

`abstract` builds a model on the meta device and records the `Recipe` of every parameter; `draw` replays one
for any box of the global tensor. An element depends on its own index only, so a rank draws just its shard and
all meshes start from bitwise equal values.

    model = abstract(lambda: nn.Linear(4, 3))
    rows = draw(recipes(model)["weight"], "weight", 0, (3, 4), [(1, 3), (0, 4)], torch.float32)   # (2, 4)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dtensor_lm.counters import BITS, STEP, keys, numbers, signed
from dtensor_lm.errors import ModelError
from dtensor_lm.recipes import FUNCTIONS, Op, Recipe, masses, numbers_of
from dtensor_lm.recording import FIX, abstract, recipes

__all__ = ["FIX", "Op", "Recipe", "abstract", "draw", "recipes"]

Box = Sequence[tuple[int, int]]
Span = tuple[int, int, int]

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
        raise ModelError("Initial values that cannot be reproduced", [f"{name}: {recipe.refusal or 'no ops'}"])
    if len(box) != len(shape) or not all(0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)):
        raise ValueError(f"{name}: box {list(box)} is not inside shape {tuple(shape)}")
    device = torch.device(device)
    result = torch.empty([stop - start for start, stop in box], dtype=dtype, device=device)
    sources = [place for place, op in enumerate(recipe.ops) if op.name not in FUNCTIONS]
    source, maps = recipe.ops[sources[-1]], recipe.ops[sources[-1] + 1 :]
    if source.name == "fill":
        value = torch.full((), *numbers_of(source), dtype=torch.float64, device="cpu")
        return result.fill_(_mapped(value, maps).to(dtype).item())
    draws_before = sum(recipe.ops[place].name != "fill" for place in sources[:-1])
    stream = keys(f"{seed}/{draws_before}/{name}")
    for part, spans in _slabs(result, shape, box):
        part.copy_(_mapped(_sample(source, _uniform(spans, stream, device)), maps))
    return result


def _mapped(x: Tensor, maps: Sequence[Op]) -> Tensor:
    for op in maps:
        x = FUNCTIONS[op.name](x, *op.numbers)
    return x


def _sample(op: Op, uniform: Tensor) -> Tensor:
    """Turn uniforms of (0, 1) into the distribution of `op` by the inverse of its distribution function."""
    if op.name == "uniform":
        low, high = numbers_of(op)
        return uniform.mul_(high - low).add_(low)
    if op.name == "normal":
        mean, std = numbers_of(op)
        return uniform.mul_(2).sub_(1).erfinv_().mul_(std * math.sqrt(2)).add_(mean)
    mean, std, low, high = numbers_of(op)
    below, inside = masses(mean, std, low, high)
    x = uniform.mul_(2 * inside).add_(2 * below - 1).erfinv_()
    return x.mul_(std * math.sqrt(2)).add_(mean).clamp_(low, high)


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
            spans += [(runs[dim][0] * strides[dim], strides[dim], local[dim]) for dim in range(cut + 1, len(local))]
            yield view[outer][first : first + rows], spans


def _uniform(spans: Sequence[Span], stream: tuple[int, int], device: torch.device) -> Tensor:
    """float64 in (0, 1), one dim per span; never 0 or 1, whose normal would be infinite."""
    # The multiplication of the index by the increment is done per dim.
    lines = (
        torch.arange(count, device=device).mul_(signed(stride * STEP)).add_(signed(first * STEP))
        for first, stride, count in spans
    )
    z = numbers(torch.full((), signed(stream[0]), dtype=torch.int64, device=device), signed(stream[1]), lines)
    return z.double().add_(0.5).mul_(2.0**-BITS)
