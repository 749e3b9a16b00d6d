"""The process groups of a mesh, kept by the tuple of their ranks: making one twice leaks descriptors and threads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtensor_lm.errors import ConfigError
from dtensor_lm.mesh import Mesh

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}
_world: dist.ProcessGroup | None = None  # the default group that the caches above belong to


def device(kind: str = "auto") -> torch.device:
    """The device of this rank: of the accelerator that torch finds, or the CPU. kind: auto, cpu, cuda, ..."""
    if kind == "auto":
        best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        kind = best.type if best is not None and best.type != "mps" else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type != kind:
        here = f"there is {found.type}" if found else "torch finds no accelerator here"
        raise ConfigError(f"device {kind!r}: {here}; use cpu, or auto")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def start(where: torch.device) -> None:
    """Makes the default process group unless there is one: by the launcher's environment, or of one process."""
    if where.type != "cpu":
        torch.accelerator.set_device_index(where.index)
    if dist.is_initialized():
        return
    backend = dist.get_default_backend_for_device(where.type)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, init_method="env://")
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _fresh() -> None:
    """Forgets groups of an earlier default group."""
    global _world
    world = dist.group.WORLD
    if world is not _world:
        _groups.clear()
        _meshes.clear()
        _world = world


def group(mesh: Mesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """The group of this rank along `axes`. All ranks of the group ask for their groups in the same order."""
    return _of(mesh.group(axes, dist.get_rank()))


def prepare(mesh: Mesh, axes: Iterable[tuple[str, ...]]) -> None:
    """Makes the groups of this rank along every tuple of axes, before ranks go different ways.

    torch names a group after the number of groups that a rank has already, so ranks that meet in one must have made
    equally many until then. In a pipeline stages need different groups: all ranks make all of them here, in one order.
    """
    for each in sorted({axes for axes in axes if axes}, key=lambda a: (len(a), a)):
        group(mesh, each)


def names(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Names of the groups that this rank has made, with the axes that they are along."""
    found = {}
    for n in range(len(mesh.active), 0, -1):
        for axes in itertools.combinations(mesh.active, n):
            ranks = tuple(sorted(mesh.group(axes, dist.get_rank())))
            if ranks == tuple(range(dist.get_world_size())):
                found[dist.group.WORLD.group_name if dist.group.WORLD else ""] = axes
            elif ranks in _groups:
                found[_groups[ranks].group_name] = axes
    return found


def _of(members: Sequence[int]) -> dist.ProcessGroup:
    _fresh()
    ranks = tuple(sorted(members))  # torch numbers a group's ranks in this order
    if ranks not in _groups:
        if ranks == tuple(range(dist.get_world_size())):
            assert dist.group.WORLD is not None
            _groups[ranks] = dist.group.WORLD
        else:
            made = dist.new_group(list(ranks), use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            _groups[ranks] = made
    return _groups[ranks]


def device_mesh(mesh: Mesh, order: tuple[str, ...] | None = None) -> DeviceMesh:
    """The DeviceMesh over the axes of size above 1 (one axis `world` of size 1 where there is none), around this rank
    where `mesh` is a part of a larger one.

    order: the same axes in another order, for tensors whose dims are cut in an order that the mesh's cannot say.
    Raises MeshError where the mesh does not fit the world.
    """
    if not dist.is_initialized():
        raise RuntimeError("a process group is needed: call torch.distributed.init_process_group first")
    mesh.check_world(dist.get_world_size())
    _fresh()
    axes = order or mesh.active
    world = dist.group.WORLD
    kind = dist.get_default_backend_for_device("cpu")
    where = "cpu" if world is not None and dist.get_backend(world) == kind else device().type
    key = (mesh, axes, where)
    if key not in _meshes:
        if not axes:
            _meshes[key] = DeviceMesh.from_group(_of([dist.get_rank()]), where, mesh_dim_names=("world",))
        else:
            ranks = torch.tensor(mesh.group(mesh.active, dist.get_rank())).view([mesh[a] for a in mesh.active])
            ranks = ranks.permute([mesh.active.index(a) for a in axes]).contiguous()
            groups = [group(mesh, (axis,)) for axis in axes]
            if len(groups) == 1:
                _meshes[key] = DeviceMesh.from_group(groups[0], where, mesh_dim_names=axes)
            else:
                _meshes[key] = DeviceMesh.from_group(groups, where, mesh=ranks, mesh_dim_names=axes)
    return _meshes[key]
