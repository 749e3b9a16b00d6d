"""Edges executed: a few autograd functions over functional collectives, on plain local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dtensor_lm.edges import Step
from dtensor_lm.mesh import Mesh
from dtensor_lm.process_groups import group

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """One process group as collectives need it: name, size, and this rank's place in it."""

    name: str
    size: int
    index: int


def group_of(mesh: Mesh, axes: tuple[str, ...]) -> Group:
    made = group(mesh, axes)
    return Group(made.group_name, made.size(), made.rank())


def all_gather(x: Tensor, g: Group, dim: int = 0) -> Tensor:
    """Equal parts from all ranks of the group, joined along `dim`."""
    out: Tensor = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), g.size, g.name))
    return out if dim == 0 else torch.cat(out.chunk(g.size), dim)


def reduce_scatter(x: Tensor, g: Group, dim: int = 0) -> Tensor:
    """This rank's part, along `dim`, of the sum over the group."""
    x = x if dim == 0 else torch.cat(x.chunk(g.size, dim))  # keeps the order of strides of a permuted x
    out: Tensor = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x.contiguous(), "sum", g.size, g.name))
    return out


def all_reduce(x: Tensor, g: Group, op: str = "sum") -> Tensor:
    """The sum (or max) over the group."""
    out: Tensor = _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, g.name))
    return out


def all_to_all(x: Tensor, g: Group, gather: int, cut: int) -> Tensor:
    """Gathers along one dim while cutting another."""
    x = torch.cat(x.chunk(g.size, cut)) if cut != 0 else x
    rows = [x.shape[0] // g.size] * g.size
    out: Tensor = _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), rows, rows, g.name))
    return torch.cat(out.chunk(g.size), gather)


class BoundEdge:
    """The steps of an edge bound to this rank's groups; applies them with their derivative."""

    def __init__(self, mesh: Mesh, steps: Sequence[Step]) -> None:
        self.steps = [(step, group_of(mesh, step.axes)) for step in steps]

    def __call__(self, x: Tensor) -> Tensor:
        if not self.steps:
            return x
        if not x.is_floating_point():
            return self.forward(x)
        out: Tensor = _Cross.apply(x, self)
        return out

    def forward(self, x: Tensor) -> Tensor:
        for step, g in self.steps:
            x = _run(step.forward, x, g, step.dim, step.other)
        return x

    def backward(self, x: Tensor) -> Tensor:
        for step, g in reversed(self.steps):
            # The transpose of an all-to-all gathers what was cut and cuts what was gathered.
            dims = (step.other, step.dim) if step.other is not None else (step.dim, None)
            x = _run(step.backward, x, g, *dims)
        return x


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, edge: BoundEdge) -> Tensor:
        ctx.edge = edge  # type: ignore[attr-defined]
        out = edge.forward(x)
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.edge.backward(grads[0]), None  # type: ignore[attr-defined]


def _run(op: str, x: Tensor, g: Group, dim: int | None, other: int | None) -> Tensor:
    if op == "nothing":
        return x
    if op == "all_reduce":
        return all_reduce(x, g)
    if op == "keep_first":
        return x if g.index == 0 else torch.zeros_like(x)
    assert dim is not None
    if op == "all_gather":
        return all_gather(x, g, dim)
    if op == "reduce_scatter":
        return reduce_scatter(x, g, dim)
    if op == "slice":
        return x.chunk(g.size, dim)[g.index].contiguous()
    if op == "pad":
        shape = list(x.shape)
        shape[dim] *= g.size
        out = x.new_zeros(shape)
        out.narrow(dim, g.index * x.shape[dim], x.shape[dim]).copy_(x)
        return out
    assert op == "all_to_all" and other is not None
    return all_to_all(x, g, dim, other)


class GroupParts:
    """`reduce n` in a signature: sums and maxima over the ranks that hold the parts of a name."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.group = group_of(mesh, axes)

    def sum(self, x: Tensor, dims: str) -> Tensor:
        return all_reduce(x, self.group)

    def max(self, x: Tensor, dims: str) -> Tensor:
        return all_reduce(x, self.group, "max")
