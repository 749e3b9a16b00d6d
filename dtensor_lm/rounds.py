"""Coalesced collectives: the tensors of one round travel in one flat buffer, uneven and empty parts padded."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_lm.collectives import Group, all_gather, all_reduce, group_of, reduce_scatter
from dtensor_lm.layout import Layout
from dtensor_lm.mesh import Mesh
from dtensor_lm.process_groups import group
from dtensor_lm.sharding_plans.predict import Round


class BoundRound:
    """One round bound to this rank: knows every member's block on every rank of the group."""

    def __init__(self, r: Round, mesh: Mesh, rank: int) -> None:
        self.round = r
        self.group: Group = group_of(mesh, r.axes)
        places = [mesh.coordinate(member) for member in mesh.group(r.axes, rank)]
        self.dims = {name: dim for name, (_, _, dim) in r.members.items()}
        # Local shapes of each member on every rank of the group, and of the whole that they join to.
        self.shapes = {n: [cut.local_shape(at) for at in places] for n, (cut, _, _) in r.members.items()}
        self.padded = {name: cut.local_numel() for name, (cut, _, _) in r.members.items()}
        self.offset = 0
        if r.op != "all_reduce":
            self.offsets = {n: self._starts(cut, whole, dim, places) for n, (cut, whole, dim) in r.members.items()}

    def _starts(self, cut: Layout, whole: Layout, dim: int, places: list[dict[str, int]]) -> list[int]:
        base = whole.box(places[0])[dim][0]
        return [cut.box(at)[dim][0] - base for at in places]

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parts -> wholes."""
        names = list(self.round.members)
        flat = torch.cat([_pad(tensors[n], self.padded[n]) for n in names])
        rows = all_gather(flat, self.group).view(self.group.size, -1).split([self.padded[n] for n in names], 1)
        out = {}
        for n, row in zip(names, rows, strict=True):
            parts = [row[i, : _numel(s)].view(s) for i, s in enumerate(self.shapes[n])]
            out[n] = torch.cat(parts, self.dims[n])
        return out

    def scatter(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Addends of wholes -> this rank's parts of the sums; plain slices where the round is a slice."""
        names = list(self.round.members)
        mine = self.group.index
        if self.round.op == "slice":
            return {n: self._part(tensors[n], n, mine) for n in names}
        rows = [
            torch.cat([_pad(self._part(tensors[n], n, i), self.padded[n]) for n in names])
            for i in range(self.group.size)
        ]
        parts = reduce_scatter(torch.cat(rows), self.group).split([self.padded[n] for n in names])
        return {
            n: part[: _numel(self.shapes[n][mine])].view(self.shapes[n][mine])
            for n, part in zip(names, parts, strict=True)
        }

    def reduce(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = list(self.round.members)
        flat = torch.cat([_pad(tensors[n], self.padded[n]) for n in names])
        parts = all_reduce(flat, self.group).split([self.padded[n] for n in names])
        return {n: part[: tensors[n].numel()].view(tensors[n].shape) for n, part in zip(names, parts, strict=True)}

    def _part(self, whole: Tensor, name: str, i: int) -> Tensor:
        dim = self.dims[name]
        return whole.narrow(dim, self.offsets[name][i], self.shapes[name][i][dim])


class BoundShare:
    """Sums of gradients over the pipeline ranks that store a parameter, by sends: a group of its own for some of the
    ranks of an axis would have to be made by all of them.

    places: of these ranks on the axis, ascending. Two exchange; of more, the first adds up and sends back.
    """

    def __init__(self, places: tuple[int, ...], r: Round, mesh: Mesh, rank: int) -> None:
        self.round = r
        (axis,) = r.axes
        line = mesh.group((axis,), rank)
        self.ranks = [line[place] for place in places]
        self.rank = rank
        self.group = group(mesh, (axis,))
        self.padded = {name: layout.local_numel() for name, (layout, _, _) in r.members.items()}

    def reduce(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Addends -> sums, bit for bit the same on every rank."""
        flat = torch.cat([_pad(tensors[n], size) for n, size in self.padded.items()])
        first, *others = self.ranks
        if len(others) == 1 or self.rank == first:
            peers = others if self.rank == first else [first]
            got = {peer: torch.empty_like(flat) for peer in peers}
            works = [dist.irecv(got[peer], peer, self.group) for peer in peers]
            if len(others) == 1:
                works.append(dist.isend(flat, peers[0], self.group))
            _wait(works)
            total = functools.reduce(torch.add, (x for _, x in sorted({**got, self.rank: flat}.items())))
            if len(others) > 1:
                _wait([dist.isend(total, peer, self.group) for peer in peers])
        else:
            total = torch.empty_like(flat)
            _wait([dist.isend(flat, first, self.group), dist.irecv(total, first, self.group)])
        parts = total.split([*self.padded.values()])
        return {n: x[: tensors[n].numel()].view(tensors[n].shape) for n, x in zip(self.padded, parts, strict=True)}


def _wait(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _pad(x: Tensor, numel: int) -> Tensor:
    x = x.reshape(-1)
    return x if x.numel() == numel else torch.cat([x, x.new_zeros(numel - x.numel())])
