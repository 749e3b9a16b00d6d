"""A device mesh as data: named axes with sizes. It needs no devices, no processes and no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from dtensor_lm.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MOST_RANKS = 2**31 - 1
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")


class Mesh:
    """Named axes and their sizes, outermost first: `Mesh(fsdp=2, tp=4)` is 8 ranks.

    Rank r stands at the mixed-radix digits of r, the last axis running fastest. Axes of size 1 are allowed
    and mean nothing: they vanish from layouts and cause no collective.

    Raises `MeshError`, with every fault at once, for a size below 1 or an unusable name.
    """

    def __init__(self, /, **sizes: int) -> None:
        faults = _faults(sizes.items())
        if faults:
            raise MeshError("this mesh cannot exist:", faults)
        self._sizes = dict(sizes)
        self._whole: Mesh | None = None

    def without(self, axis: str) -> Mesh:
        """What is left of the mesh for one place on `axis`: the other axes, on ranks that keep their numbers.

        A pipeline rank's tensors are laid out on it. Its `size` is that of one such part; `coordinate` and `group` take
        the ranks of the whole mesh and stay inside the part of the rank that they are given.
        """
        if self[axis] == 1:
            return self
        part = Mesh(**{name: size for name, size in self._sizes.items() if name != axis})
        part._whole = self.whole
        return part

    @property
    def whole(self) -> Mesh:
        """The mesh that this is a part of; itself if it is no part."""
        return self._whole or self

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Reads `fsdp=2,tp=4`; the empty text is the mesh of one process."""
        pairs: list[tuple[str, int]] = []
        faults: list[str] = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not re.fullmatch(r"[+-]?[0-9]{1,12}", size):
                faults.append(f"{part!r} is not AXIS=SIZE with a whole number, such as fsdp=2")
                continue
            pairs.append((name, int(size)))
        names = [name for name, _ in pairs]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        faults += [f"axis {name} is named {names.count(name)} times" for name in twice]
        faults += _faults(pairs)
        if faults:
            raise MeshError(f"mesh {text!r} cannot be used:", faults)
        return cls(**dict(pairs))

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self._sizes.values())

    @property
    def active(self) -> tuple[str, ...]:
        """The axes of size above 1, outermost first: the only ones that layouts and collectives know."""
        return tuple(name for name, size in self._sizes.items() if size > 1)

    def __getitem__(self, axis: str) -> int:
        """Size of an axis; 1 for an axis that the mesh does not have."""
        return self._sizes.get(axis, 1)

    def product(self, axes: Iterable[str]) -> int:
        return math.prod(self[axis] for axis in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Place of a rank on every axis. Raises `MeshError` for a rank that the mesh does not have."""
        if self._whole is not None:
            place = self._whole.coordinate(rank)
            return {name: place[name] for name in self._sizes}
        if not 0 <= rank < self.size:
            raise MeshError(
                f"rank {rank} is not on mesh {str(self) or '(one process)'}, which has ranks 0 to {self.size - 1}"
            )
        place = {}
        for name in reversed(self._sizes):
            rank, place[name] = divmod(rank, self._sizes[name])
        return place

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a place; 0 on axes that are not named, also on one that a part is without."""
        if self._whole is not None:
            return self._whole.rank(coordinate)
        rank = 0
        for name, size in self._sizes.items():
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def group(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axes` only, in the mixed-radix order of the tuple."""
        if self._whole is not None:
            return self._whole.group(axes, rank)
        place = self.coordinate(rank)
        ranks = []
        for index in range(self.product(axes)):
            for axis in reversed(axes):
                index, place[axis] = divmod(index, self[axis])
            ranks.append(self.rank(place))
        return tuple(ranks)

    def device_mesh(self) -> DeviceMesh:
        """The torch `DeviceMesh` of the running processes. Raises `MeshError` where it does not fit them."""
        from dtensor_lm.process_groups import device_mesh

        return device_mesh(self)

    def check_world(self, world: int) -> None:
        """Raises `MeshError` unless the (whole) mesh has exactly as many ranks as there are processes."""
        if self._whole is not None:
            self._whole.check_world(world)
        elif self.size != world:
            ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
            started = "1 process was" if world == 1 else f"{world} processes were"
            need = "1 process" if self.size == 1 else f"{self.size} processes"
            raise MeshError(
                f"mesh {str(self) or '(one process)'} has {ranks} but {started} started: start {need}, or "
                "choose axes "
                f"whose product is {world}"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return False
        return list(self._sizes.items()) == list(other._sizes.items()) and self._whole == other._whole

    def __hash__(self) -> int:
        return hash((tuple(self._sizes.items()), self._whole))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self._sizes.items())

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self._sizes.items())})"


def _faults(pairs: Iterable[tuple[str, int]]) -> list[str]:
    faults = []
    for name, size in pairs:
        if not _NAME.match(name):
            faults.append(f"axis name {name!r}: use lower-case letters, digits and _, such as dp or tp")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            faults.append(
                f"axis {name} has size {size!r}: a size is a whole number of at least 1 (nothing is filled in)"
            )
        elif size > MOST_RANKS:
            faults.append(f"axis {name} has size {size}: at most {MOST_RANKS}")
    return faults
