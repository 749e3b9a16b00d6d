"""What the framework supplies to a region that knows its part: an index of a name, sums and maxima over its parts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Parts(Protocol):
    """The parts of one name (`reduce vocab` in a signature). Values are exchanged outside of autograd.

    dims: names of the tensor's dims, `_` for a dim without a name; the Program predicts the bytes from them.
    """

    def sum(self, x: Tensor, dims: str) -> Tensor: ...

    def max(self, x: Tensor, dims: str) -> Tensor: ...


class Whole:
    """One part that is everything: what a region gets on a single device."""

    def sum(self, x: Tensor, dims: str) -> Tensor:
        return x

    def max(self, x: Tensor, dims: str) -> Tensor:
        return x


def indices(index: Tensor | None, size: int, device: torch.device) -> Tensor:
    """The global indices of a part, `(size,)` int64; all of them where no part was supplied (single device)."""
    return torch.arange(size, device=device) if index is None else index
