"""TrainState: a tree of DTensors. Global shape and layout come from the DTensor; steps run on its local tensor."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dtensor_lm.layout import Layout
from dtensor_lm.process_groups import device_mesh


class DonatedStateError(RuntimeError):
    """A state was used after a step had taken it: keep the state that the step returned."""


@dataclass
class TrainState:
    """Everything that a training step changes.

    parameters: name -> DTensor in the layout of `storage`. optimizer: slot (master, exp_avg, exp_avg_sq, ...) -> name
    -> DTensor in the layout of `optimizer`. step: steps taken. seed: of the random numbers of dropout. A step updates
    the tensors in place and returns a new state; the old one is donated and raises `DonatedStateError` when it is used
    again.
    """

    _parameters: dict[str, DTensor]
    _optimizer: dict[str, dict[str, DTensor]]
    _step: int = 0
    _seed: int = 0
    _donated: bool = field(default=False, repr=False)

    def _check(self) -> None:
        if self._donated:
            raise DonatedStateError("this state was donated to a step: use the state that the step returned")

    @property
    def parameters(self) -> Mapping[str, DTensor]:
        self._check()
        return MappingProxyType(self._parameters)  # a tensor put in its place would be lost at the next step

    @property
    def optimizer(self) -> Mapping[str, Mapping[str, DTensor]]:
        self._check()
        return MappingProxyType({slot: MappingProxyType(tensors) for slot, tensors in self._optimizer.items()})

    @property
    def step(self) -> int:
        self._check()
        return self._step

    @property
    def seed(self) -> int:
        self._check()
        return self._seed

    def donate(self) -> TrainState:
        """The state after this one, on the same tensors; this one can no longer be used."""
        self._check()
        after = TrainState(self._parameters, self._optimizer, self._step + 1, self._seed)
        self._donated = True
        return after


def order(layout: Layout) -> tuple[str, ...]:
    """The mesh's axes, permuted as little as needed for every dim's axes to stand in their tuple's order.

    A DTensor cuts a dim by several axes in the order of its mesh, so a layout in another order needs another mesh.
    """
    axes = list(layout.mesh.active)
    for dim in layout.dims:
        places = sorted(axes.index(axis) for axis in dim.axes)
        for place, axis in zip(places, dim.axes, strict=True):
            axes[place] = axis
    return tuple(axes)


def placements(layout: Layout, axes: tuple[str, ...]) -> list[Placement]:
    """DTensor placements over a mesh of `axes`; state is whole or cut, never addends."""
    where = {axis: i for i, dim in enumerate(layout.dims) for axis in dim.axes}
    return [Shard(where[axis]) if axis in where else Replicate() for axis in axes] or [Replicate()]


def wrap(local: Tensor, layout: Layout) -> DTensor:
    """A DTensor around a rank's block; shares its memory."""
    axes = order(layout)
    mesh = device_mesh(layout.mesh, axes)
    stride, strides = 1, []
    for size in reversed(layout.shape):
        strides.append(stride)
        stride *= max(size, 1)
    return DTensor.from_local(
        local,
        mesh,
        placements(layout, axes),
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=tuple(reversed(strides)),
    )


def local(tensor: DTensor) -> Tensor:
    """The block of this rank, sharing memory."""
    return tensor._local_tensor


def locals_of(tensors: Mapping[str, DTensor]) -> dict[str, Tensor]:
    return {name: tensor._local_tensor for name, tensor in tensors.items()}


def whole(tensors: Mapping[str, DTensor]) -> dict[str, Tensor]:
    """Copies of the whole tensors, on every rank; every rank calls it."""
    # torch warns that two axes on one dim are gathered in two collectives; that is meant.
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return {name: tensor.full_tensor().clone() for name, tensor in tensors.items()}
    finally:
        logger.setLevel(level)


def take(whole: Tensor, layout: Layout) -> Tensor:
    """This rank's block of a whole tensor, as a copy."""
    place = layout.mesh.coordinate(dist.get_rank())
    for dim, (start, stop) in enumerate(layout.box(place)):
        whole = whole.narrow(dim, start, stop - start)
    return whole.clone(memory_format=torch.contiguous_format)


def narrow(x: Tensor, outer: Layout, inner: Layout) -> Tensor:
    """A rank's block in a further cut layout, as a view of its block in a less cut one."""
    place = outer.mesh.coordinate(dist.get_rank())
    for dim, ((a, _), (start, stop)) in enumerate(zip(outer.box(place), inner.box(place), strict=True)):
        x = x.narrow(dim, start - a, stop - start)
    return x
