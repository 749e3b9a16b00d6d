"""Dropout whose mask is a function of (seed, step, site, global index): bit for bit the same on every mesh, for every
number of micro-batches, and when a forward is computed again in backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor_lm.counters import BITS, STEP, keys, numbers, signed
from dtensor_lm.region import Region


@dataclass(frozen=True)
class Moment:
    """When a forward happens. keys: (2,) int64, a hash of seed and step; row: the batch's first row in the step's."""

    keys: Tensor
    row: int = 0

    @classmethod
    def of(cls, seed: int, step: int, row: int = 0, device: torch.device | str = "cpu") -> Moment:
        return cls(torch.tensor([signed(key) for key in keys(f"dropout/{seed}/{step}")], device=device), row)


class Site:
    """A place in a model that draws, and which part of its numbers this rank holds.

    name: region and argument, the same on every rank. whole: the global shape, with all rows of a step;
    box: (start, stop) per dim of this rank's block of a micro-batch that begins with row 0; row_stride: numbers from
    one row to the next. Without whole and box, the whole of whatever shape is asked for.
    """

    def __init__(
        self,
        name: str,
        whole: Sequence[int] = (),
        box: Sequence[tuple[int, int]] = (),
        *,
        row_stride: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name = name
        self.keys = torch.tensor([signed(key) for key in keys(name)], device=device)
        self.lines = _lines(whole, box, device) if box else None
        self.row_stride = row_stride

    def at(self, moment: Moment) -> Random:
        first, second = torch.bitwise_xor(self.keys, moment.keys).unbind()
        return Random(self.name, first + signed(moment.row * self.row_stride * STEP), second, self.lines)


class Random:
    """What a region gets for an input `random batch seq embed`: numbers for the elements of a tensor of these dims."""

    def __init__(self, site: str, first: Tensor, second: Tensor, lines: list[Tensor] | None) -> None:
        self.site, self.first, self.second, self.lines = site, first, second, lines

    def keep(self, p: float, shape: Sequence[int]) -> Tensor:
        """A bool tensor of `shape`, each element False with probability p. Raises ValueError for another shape."""
        lines = self.lines
        if lines is None:
            lines = _lines(shape, [(0, n) for n in shape], self.first.device)
        if (have := [len(line) for line in lines]) != [*shape]:
            raise ValueError(f"{self.site}: random numbers of shape {have} for a tensor of shape {[*shape]}")
        if self.first.is_meta:
            return torch.empty(tuple(shape), dtype=torch.bool, device="meta")
        return numbers(self.first, self.second, lines) >= round(p * (1 << BITS))


def _lines(whole: Sequence[int], box: Sequence[tuple[int, int]], device: torch.device | str) -> list[Tensor]:
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    return [
        torch.arange(start, stop, device=device) * signed(stride * STEP)
        for (start, stop), stride in zip(box, strides, strict=True)
    ]


def dropout(x: Tensor, p: float, random: Random | None, training: bool = True) -> Tensor:
    """`x` with each element zeroed with probability p and the others divided by 1 - p (Srivastava et al. 2014).

    random: the region's input `random ...` with the names of x's dims; without one (plain PyTorch on one device)
    torch's own generator draws.
    """
    _check(p)
    if not training or p == 0:
        return x
    if random is None:
        return F.dropout(x, p)
    return x.masked_fill(~random.keep(p, x.shape), 0) * (1 / (1 - p))


def _check(p: float) -> None:
    if not isinstance(p, int | float) or not 0 <= p < 1:
        raise ValueError(f"dropout {p!r}: a number, at least 0 and below 1")


class Dropout(nn.Module):
    """`nn.Dropout` with names: `Dropout(0.1, "batch res embed")`. A region of its own, so its caller names nothing.

    names: of the dims of its input, every one of which may be cut. Raises ValueError for other text.
    """

    def __init__(self, p: float, names: str) -> None:
        super().__init__()
        _check(p)
        if not all(name.isidentifier() for name in names.split()):
            raise ValueError(f"dropout over {names!r}: write names of dims, such as 'batch res embed'; none is fused")
        self.p, self.region = p, _region(names)

    def forward(self, x: Tensor, random: Random | None = None) -> Tensor:
        return dropout(x, self.p, random, self.training)


@functools.cache
def _region(names: str) -> Region:
    """One object per text: equal layers are found by comparing what they hold."""
    return Region({"x": names, "random": f"random {names}"}, names, cuts=names)
