"""Layouts: which mesh axes cut which dim of a tensor, and what the other axes hold. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dtensor_lm.mesh import Mesh

ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "bool": 1, "uint8": 1,
}  # fmt: skip
_SHORT = {
    "float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Dim:
    """One dim: its names (several when fused), its global size, the axes that cut it, outer to inner."""

    names: tuple[str, ...]
    size: int
    axes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"({' '.join(self.names)})"


def block(size: int, axes: tuple[str, ...], mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, int]:
    """(start, stop) of a rank's block of a dim cut by `axes` in turn, each level as torch.chunk cuts."""
    start, stop = 0, size
    for axis in axes:
        chunk = -(-(stop - start) // mesh[axis])
        begin = min(start + coordinate[axis] * chunk, stop)
        start, stop = begin, min(begin + chunk, stop)
    return start, stop


@dataclass(frozen=True)
class Layout:
    """Layout of one tensor on a mesh.

    For each axis of size > 1 the tensor is in one of four states: `S` the axis cuts one of its dims, `P` the
    ranks hold addends, `R` equal values and gradients that are addends (the axis is live), `I` equal values
    and gradients that are whole and equal.
    """

    mesh: Mesh
    dtype: str
    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()
    live: frozenset[str] = frozenset()

    @property
    def cut(self) -> frozenset[str]:
        return frozenset(axis for dim in self.dims for axis in dim.axes)

    def state(self, axis: str) -> str:
        if axis in self.cut:
            return "S"
        if axis in self.partial:
            return "P"
        return "R" if axis in self.live else "I"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    def box(self, coordinate: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """(start, stop) in the global tensor, per dim, of the block of the rank at `coordinate`."""
        return tuple(block(dim.size, dim.axes, self.mesh, coordinate) for dim in self.dims)

    def local_shape(self, coordinate: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Shape of a rank's block; without a coordinate that of rank 0, which is the largest."""
        place = coordinate or dict.fromkeys(self.mesh, 0)
        return tuple(stop - start for start, stop in self.box(place))

    def local_numel(self, coordinate: Mapping[str, int] | None = None) -> int:
        numel = 1
        for size in self.local_shape(coordinate):
            numel *= size
        return numel

    def local_bytes(self, coordinate: Mapping[str, int] | None = None) -> int:
        return self.local_numel(coordinate) * ITEMSIZE[self.dtype]

    @property
    def copies(self) -> int:
        """How many ranks hold each element."""
        return self.mesh.product(axis for axis in self.mesh.active if axis not in self.cut)

    def with_axes(self, axes: tuple[tuple[str, ...], ...]) -> Layout:
        return replace(self, dims=tuple(replace(dim, axes=a) for dim, a in zip(self.dims, axes, strict=True)))

    def extends(self, other: Layout) -> bool:
        """Whether every dim begins with the axes that it has in `other`: blocks lie inside the other's blocks."""
        return all(a.axes[: len(b.axes)] == b.axes for a, b in zip(self.dims, other.dims, strict=True))

    def __str__(self) -> str:
        def show(dim: Dim) -> str:
            if not dim.axes:
                return f"{dim.name}={dim.size}"
            return f"{dim.name}@{'.'.join(dim.axes)}={dim.size}/{self.mesh.product(dim.axes)}"

        words = ", ".join(show(dim) for dim in self.dims)
        rest = [f"{s}:{'.'.join(axes)}" for s in "PRI" if (axes := self._axes_in(s))]
        return f"{_SHORT.get(self.dtype, self.dtype)}[{words}]" + (f" {' '.join(rest)}" if rest else "")

    def _axes_in(self, state: str) -> list[str]:
        return [axis for axis in self.mesh.active if self.state(axis) == state]

    def as_dict(self) -> dict[str, object]:
        return {
            "dtype": self.dtype,
            "dims": [{"name": d.name, "size": d.size, "axes": list(d.axes)} for d in self.dims],
            "states": {axis: self.state(axis) for axis in self.mesh.active},
            "local_shape": list(self.local_shape()),
            "text": str(self),
        }
