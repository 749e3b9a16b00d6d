"""The algebra of edges: how a tensor gets from one layout to another, forward and backward. Pure; no torch.

One table says what every change of state costs in both directions. Nothing else decides what a transpose is:
that of an all-gather is a reduce-scatter in one row and a slice in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dtensor_lm.layout import ITEMSIZE, Layout
from dtensor_lm.mesh import Mesh

# (state before, state after) -> (forward, backward)
TABLE: dict[tuple[str, str], tuple[str, str]] = {
    ("S", "R"): ("all_gather", "reduce_scatter"),
    ("S", "I"): ("all_gather", "slice"),
    ("R", "S"): ("slice", "pad"),
    ("I", "S"): ("slice", "all_gather"),
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("P", "I"): ("all_reduce", "nothing"),
    ("P", "R"): ("all_reduce", "all_reduce"),
    ("I", "R"): ("nothing", "all_reduce"),
    ("R", "I"): ("nothing", "keep_first"),
    ("R", "P"): ("keep_first", "keep_first"),
    ("I", "P"): ("keep_first", "nothing"),
}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class UnsupportedEdge(ValueError):
    """Two layouts between which the table has no way."""


@dataclass(frozen=True)
class Step:
    """One change of state along `axes` (several only for an all-reduce over one flattened group).

    `dim` is the dim that is gathered, sliced or scattered; an all-to-all gathers `dim` and cuts `other`.
    `forward_numel` and `backward_numel` are elements of the larger side of the collective on one rank.
    """

    axes: tuple[str, ...]
    change: tuple[str, str]
    dim: int | None = None
    other: int | None = None
    forward_numel: int = 0
    backward_numel: int = 0

    @property
    def forward(self) -> str:
        return TABLE[self.change][0]

    @property
    def backward(self) -> str:
        return TABLE[self.change][1]

    def __str__(self) -> str:
        return f"{self.change[0]}>{self.change[1]}@{'.'.join(self.axes)} {self.forward} / {self.backward}"


@dataclass(frozen=True)
class Collective:
    """One kind of collective that every rank issues `count` times a step.

    bytes: of the larger side of the tensor on one rank, each time: what all_gather returns, what
    reduce_scatter takes, what all_reduce and all_to_all hold, what is sent to one other rank.
    """

    op: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    count: int
    phase: str
    where: str

    def wire_bytes(self, mesh: Mesh) -> int:
        """Bytes that a rank sends per call in a ring ((k-1)/k of the bytes, twice that for an all-reduce)."""
        if self.op == "send":
            return self.bytes
        k = mesh.product(self.axes)
        sent = self.bytes * (k - 1) // k
        return 2 * sent if self.op == "all_reduce" else sent


def edge_steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps from one layout to another, always in the same order of axes.

    Axes come off at the inner end of their dim and go on at the inner end: all-gathers and all-to-alls first,
    then slices and reduce-scatters, then changes that cut nothing. Dims are equal in size on both sides;
    compute cuts are even.

    Raises `UnsupportedEdge` where the table has no row (slices that would have to become addends).
    """
    mesh, steps = source.mesh, []
    have = [list(dim.axes) for dim in source.dims]
    want = [dim.axes for dim in target.dims]
    state = {axis: source.state(axis) for axis in mesh.active}

    def numel() -> int:
        total = 1
        for dim, axes in zip(source.dims, have, strict=True):
            total *= dim.size // mesh.product(axes)
        return total

    def change(axis: str, after: str, dim: int | None = None, other: int | None = None) -> None:
        key = (state[axis], after)
        if key not in TABLE:
            raise UnsupportedEdge(
                f"axis {axis} cuts it before ({source}) and would hold addends after "
                f"({target}); no edge does "
                f"{state[axis]}>{after}: make it whole on {axis} on one side"
            )
        small = numel()
        if after == "S" and dim is not None and state[axis] != "S":
            have[dim].append(axis)
            forward = backward = small
        elif state[axis] == "S" and after == "S":
            assert dim is not None and other is not None
            have[dim].pop()
            have[other].append(axis)
            forward = backward = small
        elif state[axis] == "S":
            assert dim is not None
            have[dim].pop()
            forward = backward = small * mesh[axis]
        else:
            forward = backward = small
        steps.append(Step((axis,), key, dim, other, forward, backward))
        state[axis] = after

    for dim, axes in enumerate(want):
        keep = 0
        while keep < min(len(have[dim]), len(axes)) and have[dim][keep] == axes[keep]:
            keep += 1
        for axis in reversed(have[dim][keep:]):
            other = next(
                (j for j, to in enumerate(want) if j != dim and to[: len(have[j]) + 1] == (*have[j], axis)),
                None,
            )
            if other is not None:
                change(axis, "S", dim, other)
            else:
                after = target.state(axis)
                change(axis, ("R" if axis in target.live else "I") if after == "S" else after, dim)
    for dim, axes in enumerate(want):
        for axis in axes[len(have[dim]) :]:
            change(axis, "S", dim)
    for axis in mesh.active:
        if state[axis] != target.state(axis):
            change(axis, target.state(axis))
    return tuple(_flatten(steps))


def _flatten(steps: list[Step]) -> list[Step]:
    """Joins all-reduces of the same change into one over a flattened group; their order does not matter."""
    joined: list[Step] = []
    for step in steps:
        last = next((i for i, s in enumerate(joined) if s.change == step.change and s.dim is None), None)
        if last is not None and step.dim is None and "all_reduce" in (step.forward, step.backward):
            old = joined[last]
            joined[last] = replace(old, axes=old.axes + step.axes)
        else:
            joined.append(step)
    return joined


def collectives(
    steps: tuple[Step, ...], dtype: str, count: int, where: str, backward: bool = True
) -> Iterator[Collective]:
    """The collectives of an edge that is crossed `count` times. backward: whether there is a gradient."""
    for step in steps:
        if step.forward in COLLECTIVES:
            size = step.forward_numel * ITEMSIZE[dtype]
            yield Collective(step.forward, step.axes, dtype, size, count, "forward", where)
    for step in reversed(steps) if backward else ():
        if step.backward in COLLECTIVES:
            size = step.backward_numel * ITEMSIZE[dtype]
            yield Collective(step.backward, step.axes, dtype, size, count, "backward", where)
