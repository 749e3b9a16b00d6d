"""Process groups are kept by their ranks: many meshes make few groups and leave few descriptors."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from dtensor_lm.errors import MeshError
from dtensor_lm.mesh import Mesh
from dtensor_lm.testing.workers import pool


def meshes() -> list[Mesh]:
    """300 different meshes of four ranks."""
    shapes: list[dict[str, int]] = []
    for i in range(60):
        a, b, c = f"a{i}", f"b{i}", f"c{i}"
        shapes += [{a: 4}, {a: 2, b: 2}, {a: 2, b: 1, c: 2}, {a: 4, b: 1}, {a: 1, b: 2, c: 2}]
    return [Mesh(**sizes) for sizes in shapes]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Of the process, with those that gloo starts itself."""
    return len(os.listdir("/proc/self/task"))


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def make_all() -> tuple[list[int], list[int], list[int]]:
    """Groups, descriptors and threads: before, after the first five meshes, after all three hundred."""
    from dtensor_lm.process_groups import group

    counts: tuple[list[int], list[int], list[int]] = ([], [], [])

    def count() -> None:
        for into, number in zip(counts, (groups(), descriptors(), threads()), strict=True):
            into.append(number)

    count()
    for i, mesh in enumerate(meshes()):
        device_mesh = mesh.device_mesh()
        assert device_mesh.mesh_dim_names == mesh.active
        for axis in mesh.active:
            x = torch.ones(())
            dist.all_reduce(x, group=group(mesh, (axis,)))
            assert x.item() == mesh[axis]
            assert device_mesh.get_group(axis) is group(mesh, (axis,))
        group(mesh, mesh.active)
        group(mesh, tuple(reversed(mesh.active)))
        if i == 4:
            count()
    count()
    return counts


def test_three_hundred_meshes_leave_few_groups() -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("counts descriptors in /proc")
    pool(4).stop()  # fresh workers, without the groups of other tests
    for counts in pool(4).run(make_all):
        for name, (before, some, every) in zip(("groups", "descriptors", "threads"), counts, strict=True):
            assert every == some, f"{name}: {some} after five meshes of all shapes, {every} after three hundred"
            if name == "groups":  # pairs along two axes, and all four ranks in the other order
                assert every - before <= 3


def ranks_of_groups() -> dict[str, list[int]]:
    from dtensor_lm.collectives import group_of
    from dtensor_lm.process_groups import group

    mesh = Mesh(dp=2, tp=2)
    found = {}
    for axes in (("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")):
        made = group_of(mesh, axes)
        gathered = [torch.empty((), dtype=torch.int64) for _ in range(made.size)]
        dist.all_gather(gathered, torch.tensor(dist.get_rank()), group=group(mesh, axes))
        ranks = [int(x) for x in gathered]
        assert ranks[made.index] == dist.get_rank()
        found[".".join(axes)] = ranks
    return found


@pytest.mark.quick
def test_members_of_groups() -> None:
    """Torch numbers the members of a group upwards: the place in a group is the place in the tuple of axes
    only where the tuple has the order of the mesh. Groups over other tuples serve all-reduces, which do not
    care about order.
    """
    mesh = Mesh(dp=2, tp=2)
    for rank, found in enumerate(pool(4).run(ranks_of_groups)):
        for axes, ranks in found.items():
            want = mesh.group(tuple(axes.split(".")), rank)
            assert ranks == sorted(want), (axes, rank)
            assert axes == "tp.dp" or ranks == list(want)


def too_small() -> str:
    try:
        Mesh(dp=3, tp=2).device_mesh()
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.quick
@pytest.mark.case("UX-02")
def test_a_mesh_that_does_not_fit_the_world() -> None:
    text = (
        "mesh dp=3,tp=2 has 6 ranks but 2 processes were started: start 6 processes, or choose axes whose product is 2"
    )
    assert pool(2).run(too_small) == [text, text]


def alone() -> tuple[tuple[str, ...], int]:
    made = Mesh(dp=1, tp=1).device_mesh()
    return made.mesh_dim_names, made.size()


@pytest.mark.quick
def test_one_process_has_a_mesh_of_one() -> None:
    assert pool(1).run(alone) == [(("world",), 1)]


@pytest.mark.quick
@pytest.mark.case("UX-02")
def test_a_group_is_needed_first() -> None:
    with pytest.raises(RuntimeError, match="a process group is needed"):
        Mesh(dp=2).device_mesh()
