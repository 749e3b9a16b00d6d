"""Layouts: blocks against torch.chunk and against DTensor, states, and how a layout is printed."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_lm.layout import Dim, Layout
from dtensor_lm.mesh import Mesh
from dtensor_lm.testing.workers import pool

MESH = Mesh(dp=2, fsdp=3, tp=2)


def layout(mesh: Mesh, *dims: tuple[int, tuple[str, ...]], dtype: str = "float32", **more: frozenset[str]) -> Layout:
    names = "abcd"
    return Layout(mesh, dtype, tuple(Dim((names[i],), size, axes) for i, (size, axes) in enumerate(dims)), **more)


def chunked(x: torch.Tensor, where: Layout, place: dict[str, int]) -> torch.Tensor:
    """A rank's block by nested torch.chunk, empty where there are too few chunks."""
    for dim, d in enumerate(where.dims):
        for axis in d.axes:
            parts = list(x.chunk(where.mesh[axis], dim))
            x = parts[place[axis]] if place[axis] < len(parts) else x.narrow(dim, x.shape[dim], 0)
    return x


@pytest.mark.quick
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_blocks_are_nested_chunks(data: st.DataObject) -> None:
    axes = data.draw(st.permutations(list(MESH)))
    first, second = sorted(data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3))))
    sizes = data.draw(st.tuples(st.integers(0, 17), st.integers(0, 9)))
    where = layout(MESH, (sizes[0], tuple(axes[:first])), (sizes[1], tuple(axes[first:second])))
    x = torch.arange(sizes[0] * sizes[1]).view(sizes)
    seen = torch.zeros_like(x)
    for rank in range(MESH.size):
        place = MESH.coordinate(rank)
        want = chunked(x, where, place)
        (a, b), (c, d) = where.box(place)
        assert torch.equal(x[a:b, c:d], want)
        assert where.local_shape(place) == tuple(want.shape)
        assert where.local_numel(place) == want.numel() <= where.local_numel(), "rank 0 holds the most"
        assert where.local_bytes(place) == 4 * want.numel()
        seen[a:b, c:d] += 1
    assert (seen == where.copies).all()


CASES = [
    # mesh, dims: tuples in the mesh's order and against it, uneven rows, empty shards
    (Mesh(dp=2, fsdp=2), (8, ("fsdp", "dp")), (3, ())),
    (Mesh(dp=2, fsdp=2), (7, ("fsdp", "dp")), (3, ())),
    (Mesh(dp=2, fsdp=2), (5, ("dp", "fsdp")), (2, ())),
    (Mesh(dp=2, fsdp=2), (3, ("fsdp",)), (5, ("dp",))),
    (Mesh(dp=2, fsdp=2), (2, ("fsdp", "dp")), (3, ())),
    (Mesh(dp=2, fsdp=2), (1, ("dp", "fsdp")), (3, ())),
    (Mesh(dp=4), (5, ("dp",)), (3, ())),
    (Mesh(dp=4), (3, ()), (2, ("dp",))),
    (Mesh(dp=4), (3, ()), (2, ())),
    (Mesh(tp=1, dp=4, pp=1), (9, ("dp",)), (2, ())),
]


def through_dtensor() -> list[tuple[list[int], bool, bool, list[int]]]:
    return [compare(*case) for case in CASES]


def compare(mesh: Mesh, *dims: tuple[int, tuple[str, ...]]) -> tuple[list[int], bool, bool, list[int]]:
    """Local shape that DTensor computes; full_tensor is the whole; take and narrow agree."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from dtensor_lm.state import narrow, take, wrap

    where = layout(mesh, *dims)
    whole = torch.arange(where.shape[0] * where.shape[1], dtype=torch.float32).view(where.shape)
    mine = take(whole, where)
    tensor = wrap(mine, where)
    shape, _ = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    same = torch.equal(mine, chunked(whole, where, mesh.coordinate(dist.get_rank())))
    uncut = layout(mesh, *((size, ()) for size, _ in dims))
    same = same and torch.equal(narrow(whole, uncut, where), mine)
    return list(shape), torch.equal(tensor.full_tensor(), whole), same, list(mine.shape)


@pytest.mark.quick
def test_blocks_are_those_of_dtensor() -> None:
    for rank, results in enumerate(pool(4).run(through_dtensor)):
        for case, (shape, whole, same, local) in zip(CASES, results, strict=True):
            assert whole and same and shape == local, (case, rank, shape, local)


@pytest.mark.quick
def test_states() -> None:
    where = layout(MESH, (6, ("dp",)), partial=frozenset({"fsdp"}), live=frozenset({"dp", "fsdp", "tp"}))
    assert {axis: where.state(axis) for axis in MESH} == {"dp": "S", "fsdp": "P", "tp": "R"}
    assert layout(MESH, (6, ())).state("tp") == "I"
    assert layout(MESH, (6, ("dp", "tp"))).copies == 3


@pytest.mark.quick
def test_printing() -> None:
    mesh = Mesh(dp=2, fsdp=2, tp=4, cp=1)
    dims = (Dim(("heads", "head_dim"), 64, ("tp",)), Dim(("embed",), 32, ("fsdp", "dp")))
    assert str(Layout(mesh, "bfloat16", dims)) == "bf16[(heads head_dim)@tp=64/4, embed@fsdp.dp=32/4]"
    where = Layout(mesh, "float32", (Dim(("seq",), 5),), frozenset({"tp"}), frozenset({"dp", "tp", "fsdp"}))
    assert str(where) == "f32[seq=5] P:tp R:dp.fsdp"
    assert str(Layout(mesh, "int64", ())) == "i64[] I:dp.fsdp.tp"
    assert str(Layout(Mesh(), "float64", (Dim(("a",), 3),))) == "f64[a=3]"
    assert json.loads(json.dumps(where.as_dict())) == {
        "dtype": "float32",
        "dims": [{"name": "seq", "size": 5, "axes": []}],
        "states": {"dp": "R", "fsdp": "R", "tp": "P"},
        "local_shape": [5],
        "text": "f32[seq=5] P:tp R:dp.fsdp",
    }


@pytest.mark.quick
def test_every_rank_of_a_large_mesh() -> None:
    mesh = Mesh(pp=2, fsdp=64, tp=128)
    where = layout(mesh, (16_384, ("tp",)), (53_248, ("fsdp",)))
    assert where.local_shape() == (128, 832)
    rows = sorted({where.box(mesh.coordinate(rank))[0] for rank in range(128)})
    assert rows == list(itertools.pairwise(range(0, 16_385, 128)))
