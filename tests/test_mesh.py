"""Meshes as data: reading, places of ranks, groups, and the literal messages for meshes that cannot exist."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_lm.errors import MeshError
from dtensor_lm.mesh import Mesh

pytestmark = pytest.mark.quick

AXES = ("pp", "dp", "fsdp", "tp")
meshes = st.permutations(AXES).flatmap(
    lambda names: st.lists(st.integers(1, 4), max_size=4).map(
        lambda sizes: Mesh(**dict(zip(names, sizes, strict=False)))
    )
)


@settings(deadline=None, max_examples=60)
@given(meshes)
def test_reading_what_is_written(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert hash(Mesh.parse(str(mesh))) == hash(mesh)
    assert eval(repr(mesh), {"Mesh": Mesh}) == mesh


@settings(deadline=None, max_examples=60)
@given(meshes, st.data())
def test_places_and_groups(mesh: Mesh, data: st.DataObject) -> None:
    places = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    assert [tuple(place[axis] for axis in mesh) for place in places] == sorted(
        {tuple(place[axis] for axis in mesh) for place in places}
    ), "ranks count up with the last axis fastest"

    axes = tuple(data.draw(st.permutations(list(mesh))))[: data.draw(st.integers(0, len(list(mesh))))]
    groups = {mesh.group(axes, rank) for rank in range(mesh.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size)), "groups are a partition"
    for group in groups:
        assert len(group) == mesh.product(axes)
        # The place in the group is the mixed radix of the tuple, whatever the order of the mesh.
        for index, rank in enumerate(group):
            digits = 0
            for axis in axes:
                digits = digits * mesh[axis] + places[rank][axis]
            assert digits == index
        assert len({tuple(v for a, v in places[rank].items() if a not in axes) for rank in group}) == 1


def test_order_is_part_of_a_mesh() -> None:
    assert Mesh(dp=2, tp=4) != Mesh(tp=4, dp=2)
    assert list(Mesh(dp=2, tp=4)) == ["dp", "tp"]
    assert Mesh(dp=2, tp=4).group(("tp", "dp"), 0) == (0, 4, 1, 5, 2, 6, 3, 7)


def test_axes_of_size_one_vanish() -> None:
    mesh = Mesh(dp=1, tp=4, cp=1)
    assert mesh.active == ("tp",)
    assert mesh["dp"] == mesh["absent"] == 1
    assert mesh.product(("dp", "tp", "absent")) == 4
    assert (Mesh().size, Mesh().active, str(Mesh()), Mesh.parse("")) == (1, (), "", Mesh())


def test_large_meshes_are_instant() -> None:
    start = time.perf_counter()
    mesh = Mesh.parse("pp=16, fsdp=128, tp=8")
    assert mesh.size == 16_384
    assert mesh.coordinate(16_383) == {"pp": 15, "fsdp": 127, "tp": 7}
    assert mesh.group(("pp", "fsdp", "tp"), 77) == tuple(range(16_384))
    assert mesh.group(("fsdp",), 1024 * 3 + 5)[:3] == (3077, 3085, 3093)
    assert Mesh(dp=10**9).coordinate(10**9 - 1) == {"dp": 10**9 - 1}
    assert time.perf_counter() - start < 1


SIZE = "a size is a whole number of at least 1 (nothing is filled in)"
NAME = "use lower-case letters, digits and _, such as dp or tp"


@pytest.mark.case("UX-02")
@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("dp=0", [f"axis dp has size 0: {SIZE}"]),
        ("dp=-1,tp=3", [f"axis dp has size -1: {SIZE}"]),
        ("dp=2,tp=4,dp=2", ["axis dp is named 2 times"]),
        ("dp", ["'dp' is not AXIS=SIZE with a whole number, such as fsdp=2"]),
        ("dp=two", ["'dp=two' is not AXIS=SIZE with a whole number, such as fsdp=2"]),
        ("dp=2.0", ["'dp=2.0' is not AXIS=SIZE with a whole number, such as fsdp=2"]),
        ("dp=2=3", ["'dp=2=3' is not AXIS=SIZE with a whole number, such as fsdp=2"]),
        ("DP=2", [f"axis name 'DP': {NAME}"]),
        ("=2", [f"axis name '': {NAME}"]),
        ("2d=2", [f"axis name '2d': {NAME}"]),
        (
            "dp=x, Tp=0, cp=1, cp=2",
            [
                "'dp=x' is not AXIS=SIZE with a whole number, such as fsdp=2",
                "axis cp is named 2 times",
                f"axis name 'Tp': {NAME}",
                f"axis Tp has size 0: {SIZE}",
            ],
        ),
    ],
)
def test_unreadable_meshes(text: str, faults: list[str]) -> None:
    with pytest.raises(MeshError) as error:
        Mesh.parse(text)
    assert str(error.value) == "\n".join([f"mesh {text!r} cannot be used:", *(f"  - {fault}" for fault in faults)])


@pytest.mark.case("UX-02")
def test_impossible_sizes_in_code() -> None:
    with pytest.raises(MeshError) as error:
        Mesh(dp=0, tp="2", cp=True, fsdp=2.0, pp=-1, ok=3)  # type: ignore[arg-type]
    assert str(error.value) == (
        "this mesh cannot exist:\n"
        f"  - axis dp has size 0: {SIZE}\n"
        f"  - axis tp has size '2': {SIZE}\n"
        f"  - axis cp has size True: {SIZE}\n"
        f"  - axis fsdp has size 2.0: {SIZE}\n"
        f"  - axis pp has size -1: {SIZE}"
    )


@pytest.mark.case("UX-02")
def test_a_mesh_must_fit_the_world() -> None:
    Mesh(dp=2, tp=2).check_world(4)
    Mesh().check_world(1)
    for mesh, world in ((Mesh(dp=3, tp=2), 4), (Mesh(dp=2), 4)):
        with pytest.raises(MeshError) as error:
            mesh.check_world(world)
        assert str(error.value) == (
            f"mesh {mesh} has {mesh.size} ranks but 4 processes were started: start {mesh.size} processes, "
            "or choose "
            f"axes whose product is 4"
        )
    for mesh, world, text in (
        (Mesh(), 4, "mesh (one process) has 1 rank but 4 processes were started: start 1 process, or choose "
                    "axes "
                    "whose product is 4"),
        (Mesh(dp=2), 1, "mesh dp=2 has 2 ranks but 1 process was started: start 2 processes, or choose axes "
                        "whose "
                        "product is 1"),
    ):  # fmt: skip
        with pytest.raises(MeshError) as error:
            mesh.check_world(world)
        assert str(error.value) == text


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside(rank: int) -> None:
    with pytest.raises(MeshError) as error:
        Mesh(dp=2, tp=4).coordinate(rank)
    assert str(error.value) == f"rank {rank} is not on mesh dp=2,tp=4, which has ranks 0 to 7"


def test_size_is_the_product() -> None:
    assert Mesh(a=3, b=5, c=7).size == math.prod((3, 5, 7))
