"""The table of edges: every row in a simulation of all ranks, and on real ranks against DTensor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_lm import edges
from dtensor_lm.collectives import BoundEdge
from dtensor_lm.edges import COLLECTIVES, TABLE, Step, UnsupportedEdge, collectives, edge_steps
from dtensor_lm.layout import Dim, Layout
from dtensor_lm.mesh import Mesh
from dtensor_lm.testing.workers import pool

Ranks = list[np.ndarray]
# What a state means. Values: slices, addends, equal, equal. Gradients: slices, equal, addends, equal.
VALUES = {"S": "slices", "P": "addends", "R": "equal", "I": "equal"}
GRADIENTS = {"S": "slices", "P": "equal", "R": "addends", "I": "equal"}


def spread(whole: np.ndarray, where: Layout, meaning: Mapping[str, str], seed: int) -> Ranks:
    """What the ranks hold of a whole tensor; addends are random and sum to it. Integers: sums are exact."""
    rng = np.random.default_rng(seed)
    mesh = where.mesh
    axes = tuple(axis for axis in mesh.active if meaning[where.state(axis)] == "addends")
    addends: dict[tuple[int, ...], np.ndarray] = {}
    places = list(itertools.product(*(range(mesh[axis]) for axis in axes)))
    for place in places[1:]:
        addends[place] = rng.integers(-50, 50, whole.shape)
    addends[places[0]] = whole - sum(addends.values(), np.zeros_like(whole))
    ranks = []
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        box = tuple(slice(start, stop) for start, stop in where.box(at))
        ranks.append(addends[tuple(at[axis] for axis in axes)][box])
    return ranks


def collect(ranks: Ranks, where: Layout, meaning: Mapping[str, str]) -> np.ndarray:
    """The whole tensor of what the ranks hold; asserts that what should be equal is equal."""
    mesh = where.mesh
    whole = np.zeros(where.shape, ranks[0].dtype)
    equal = [axis for axis in mesh.active if meaning[where.state(axis)] == "equal"]
    for rank, value in enumerate(ranks):
        at = mesh.coordinate(rank)
        assert value.shape == where.local_shape(at)
        first = mesh.rank({**at, **dict.fromkeys(equal, 0)})
        np.testing.assert_array_equal(value, ranks[first], err_msg=f"rank {rank} of {where}")
        if rank == first:
            whole[tuple(slice(start, stop) for start, stop in where.box(at))] += value
    return whole


def perform(op: str, ranks: Ranks, mesh: Mesh, axes: tuple[str, ...], dim: int | None, other: int | None) -> Ranks:
    """One operation on all ranks at once."""
    out = []
    for rank, value in enumerate(ranks):
        members = mesh.group(axes, rank)
        k, i = len(members), members.index(rank)
        theirs = [ranks[member] for member in members]
        if op == "nothing":
            out.append(value)
        elif op == "keep_first":
            out.append(value if i == 0 else np.zeros_like(value))
        elif op == "all_reduce":
            out.append(sum(theirs[1:], theirs[0]))
        elif op == "all_gather":
            out.append(np.concatenate(theirs, dim))
        elif op == "slice":
            out.append(np.split(value, k, dim)[i])
        elif op == "reduce_scatter":
            out.append(np.split(sum(theirs[1:], theirs[0]), k, dim)[i])
        elif op == "all_to_all":
            out.append(np.concatenate([np.split(each, k, other)[i] for each in theirs], dim))
        else:
            assert op == "pad"
            zeros = np.zeros_like(value)
            out.append(np.concatenate([value if j == i else zeros for j in range(k)], dim))
    return out


def go(steps: tuple[Step, ...], ranks: Ranks, mesh: Mesh) -> Ranks:
    for step in steps:
        before, ranks = ranks, perform(step.forward, ranks, mesh, step.axes, step.dim, step.other)
        if step.forward in COLLECTIVES:
            assert step.forward_numel == max(before[0].size, ranks[0].size)
    return ranks


def back(steps: tuple[Step, ...], ranks: Ranks, mesh: Mesh) -> Ranks:
    for step in reversed(steps):
        dim, other = (step.other, step.dim) if step.other is not None else (step.dim, None)
        before, ranks = ranks, perform(step.backward, ranks, mesh, step.axes, dim, other)
        if step.backward in COLLECTIVES:
            assert step.backward_numel == max(before[0].size, ranks[0].size)
    return ranks


def check_edge(source: Layout, target: Layout, seed: int = 0) -> None:
    """The law of an edge: the same whole tensor on both sides, and forward and backward are transposes."""
    steps, mesh = edge_steps(source, target), source.mesh
    rng = np.random.default_rng(seed)
    x, g = rng.integers(-50, 50, source.shape), rng.integers(-50, 50, source.shape)
    there = go(steps, spread(x, source, VALUES, seed + 1), mesh)
    np.testing.assert_array_equal(collect(there, target, VALUES), x)
    here = back(steps, spread(g, target, GRADIENTS, seed + 2), mesh)
    np.testing.assert_array_equal(collect(here, source, GRADIENTS), g)


def one_axis(size: int, state: str, dim: int = 0, mesh: Mesh | None = None) -> Layout:
    """A matrix in one state on the axis x."""
    mesh = mesh or Mesh(x=size)
    cuts = [("x",) if state == "S" and i == dim else () for i in range(2)]
    return Layout(
        mesh,
        "float64",
        tuple(Dim((n,), s, c) for n, s, c in zip("ab", (8, 16), cuts, strict=True)),
        frozenset("x") if state == "P" else frozenset(),
        frozenset("x") if state != "I" else frozenset(),
    )


def rows() -> list[tuple[str, str, int, int]]:
    """Every row of the table, for each dim that it can touch."""
    found = []
    for before, after in TABLE:
        for dim in (0, 1) if "S" in (before, after) else (0,):
            found.append((before, after, dim, 1 - dim if before == after else dim))
    return found


@pytest.mark.quick
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("row", rows(), ids=lambda r: f"{r[0]}{r[2]}>{r[1]}{r[3]}")
def test_every_row(row: tuple[str, str, int, int], size: int) -> None:
    before, after, dim, other = row
    mesh = Mesh(x=size)
    dims = ((24, ()), (48, ()))

    def make(state: str, at: int) -> Layout:
        where = one_axis(size, state, at, mesh)
        return Layout(
            mesh,
            "float64",
            tuple(Dim(d.names, n, d.axes) for d, (n, _) in zip(where.dims, dims, strict=True)),
            where.partial,
            where.live,
        )

    (step,) = edge_steps(make(before, dim), make(after, other))
    assert step.change == (before, after)
    assert (step.forward, step.backward) == TABLE[before, after]
    check_edge(make(before, dim), make(after, other))


@pytest.mark.quick
def test_equal_states_cost_nothing() -> None:
    for state in "SPRI":
        assert edge_steps(one_axis(2, state), one_axis(2, state)) == ()


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, ndim: int) -> Layout:
    cuts: list[tuple[str, ...]] = [()] * ndim
    partial, live = set(), set()
    for axis in draw(st.permutations(mesh.active)):
        state = draw(st.sampled_from("SPRI" if ndim else "PRI"))
        if state == "S":
            dim = draw(st.integers(0, ndim - 1))
            cuts[dim] = (*cuts[dim], axis)
        if state == "P":
            partial.add(axis)
        if state == "R" or (state in "SP" and draw(st.booleans())):
            live.add(axis)
    size = mesh.size
    return Layout(
        mesh,
        "float64",
        tuple(Dim(("abc"[i],), size, cuts[i]) for i in range(ndim)),
        frozenset(partial),
        frozenset(live),
    )


MESHES = [Mesh(x=2), Mesh(x=3), Mesh(x=2, y=2), Mesh(x=1, y=3, z=2), Mesh(x=2, y=2, z=2), Mesh(x=2, y=3, z=2)]


@pytest.mark.quick
@settings(deadline=None, max_examples=400)
@given(st.data())
def test_any_layout_to_any_layout(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    ndim = data.draw(st.integers(0, 3))
    source, target = data.draw(layouts(mesh, ndim)), data.draw(layouts(mesh, ndim))
    impossible = [axis for axis in mesh.active if (source.state(axis), target.state(axis)) == ("S", "P")]
    if impossible:
        with pytest.raises(UnsupportedEdge, match=r"^axis [xyz] cuts it before"):
            edge_steps(source, target)
    else:
        check_edge(source, target, data.draw(st.integers(0, 99)))


@pytest.mark.quick
def test_the_law_finds_a_wrong_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other operation at any place of the table breaks the law."""
    operations = {op for row in TABLE.values() for op in row}
    unseen = []
    for (before, after), row in TABLE.items():
        source, target = one_axis(4, before), one_axis(4, after, 1 if before == after else 0)
        for place, op in enumerate(row):
            for wrong in operations - {op}:
                broken = (wrong, row[1]) if place == 0 else (row[0], wrong)
                monkeypatch.setitem(edges.TABLE, (before, after), broken)
                try:
                    check_edge(source, target)
                    unseen.append((before, after, place, wrong))
                except (AssertionError, ValueError, TypeError, IndexError):
                    pass
                monkeypatch.setitem(edges.TABLE, (before, after), row)
    assert unseen == []


@pytest.mark.quick
def test_axes_come_off_and_go_on_at_the_inner_end() -> None:
    mesh = Mesh(cp=2, tp=2)
    live = frozenset(mesh)

    def two(a: tuple[str, ...], b: tuple[str, ...]) -> Layout:
        return Layout(mesh, "float64", (Dim(("a",), 8, a), Dim(("b",), 8, b)), live=live)

    # Sequence parallelism inside context parallelism: all-gather over tp only.
    assert [str(s) for s in edge_steps(two(("cp", "tp"), ()), two(("cp",), ()))] == [
        "S>R@tp all_gather / reduce_scatter"
    ]
    # Ulysses: cp leaves the sequence and is appended to the heads.
    (step,) = edge_steps(two(("cp",), ("tp",)), two((), ("tp", "cp")))
    assert (step.axes, step.forward, step.dim, step.other) == (("cp",), "all_to_all", 0, 1)
    # Against the order an axis cannot be taken from the middle: both come off.
    assert [str(s) for s in edge_steps(two(("cp", "tp"), ()), two(("tp",), ()))] == [
        "S>R@tp all_gather / reduce_scatter",
        "S>R@cp all_gather / reduce_scatter",
        "R>S@tp slice / pad",
    ]


@pytest.mark.quick
def test_all_reduces_of_one_change_are_one() -> None:
    mesh = Mesh(dp=2, cp=2, tp=2)
    dims = (Dim(("a",), 8),)
    live = frozenset(mesh)
    source = Layout(mesh, "float32", dims, partial=frozenset({"dp", "tp"}), live=live)
    assert [str(s) for s in edge_steps(source, Layout(mesh, "float32", dims, live=live))] == [
        "P>R@dp.tp all_reduce / all_reduce"
    ]
    steps = edge_steps(Layout(mesh, "float32", dims), Layout(mesh, "float32", dims, live=live))
    assert [str(s) for s in steps] == ["I>R@dp.cp.tp nothing / all_reduce"]
    (once,) = collectives(steps, "float32", 3, "here")
    assert (once.op, once.axes, once.bytes, once.count, once.phase) == (
        "all_reduce",
        ("dp", "cp", "tp"),
        32,
        3,
        "backward",
    )
    assert once.wire_bytes(mesh) == 2 * 32 * 7 // 8
    assert list(collectives(steps, "float32", 3, "here", backward=False)) == []


@pytest.mark.quick
def test_the_message_of_a_way_that_does_not_exist() -> None:
    with pytest.raises(UnsupportedEdge) as error:
        edge_steps(one_axis(2, "S"), one_axis(2, "P"))
    assert str(error.value) == (
        "axis x cuts it before (f64[a@x=8/2, b=16]) and would hold addends after (f64[a=8, b=16] P:x); no "
        "edge does S>P: "
        "make it whole on x on one side"
    )


# Real ranks


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def on_ranks(source: Layout, target: Layout) -> tuple[bool, bool, bool]:
    """Forward and backward of a bound edge equal the simulator, and forward equals DTensor.redistribute."""
    from dtensor_lm.process_groups import device_mesh
    from dtensor_lm.state import order, placements

    mesh, rank = source.mesh, dist.get_rank()
    steps = edge_steps(source, target)
    rng = np.random.default_rng(0)
    x, g = rng.integers(-50, 50, source.shape), rng.integers(-50, 50, source.shape)
    xs, gs = spread(x, source, VALUES, 1), spread(g, target, GRADIENTS, 2)
    mine = tensor(xs[rank]).requires_grad_()
    out = BoundEdge(mesh, steps)(mine)
    (grad,) = torch.autograd.grad(out, mine, tensor(gs[rank]))
    forward = torch.equal(out, tensor(go(steps, xs, mesh)[rank]))
    backward = torch.equal(grad, tensor(back(steps, gs, mesh)[rank]))

    axes = order(source)
    reference = True
    if axes == order(target):
        from torch.distributed.tensor import DTensor, Partial

        def where(layout: Layout) -> list[object]:
            cut = placements(layout, axes)
            return [Partial() if layout.state(a) == "P" else p for a, p in zip(axes, cut, strict=True)]

        start = DTensor.from_local(mine.detach(), device_mesh(mesh, axes), where(source), run_check=False)
        if not any(target.state(a) == "P" for a in axes):  # DTensor makes other addends of the same sum
            reference = torch.equal(start.redistribute(placements=where(target)).to_local(), out)
        else:
            whole = DTensor.from_local(out.detach(), start.device_mesh, where(target), run_check=False).full_tensor()
            reference = torch.equal(whole, start.full_tensor())
    return forward, backward, reference


def run_edges(pairs: list[tuple[Layout, Layout]]) -> list[tuple[bool, bool, bool]]:
    return [on_ranks(source, target) for source, target in pairs]


def assert_edges(world: int, pairs: list[tuple[Layout, Layout]]) -> None:
    for rank, results in enumerate(pool(world).run(run_edges, pairs)):
        for (source, target), found in zip(pairs, results, strict=True):
            assert found == (True, True, True), (rank, str(source), str(target), found)


def row_pairs(size: int) -> list[tuple[Layout, Layout]]:
    return [(one_axis(size, before, dim), one_axis(size, after, other)) for before, after, dim, other in rows()]


@pytest.mark.quick
@pytest.mark.parametrize("world", [2, 4])
def test_every_row_on_real_ranks(world: int) -> None:
    assert_edges(world, row_pairs(world))


def test_every_row_on_eight_ranks() -> None:
    assert_edges(8, row_pairs(8))


def several(
    mesh: Mesh,
    a: tuple[str, ...],
    b: tuple[str, ...],
    c: tuple[str, ...] = (),
    partial: str = "",
    live: str = "dp cp tp",
) -> Layout:
    axes = (a, b, c)
    return Layout(
        mesh,
        "float64",
        tuple(Dim((n,), 8, x) for n, x in zip("abc", axes, strict=True)),
        frozenset(partial.split()),
        frozenset(live.split()),
    )


def several_axes(mesh: Mesh) -> list[tuple[Layout, Layout]]:
    none: tuple[str, ...] = ()
    return [
        (several(mesh, ("cp", "tp"), none), several(mesh, ("cp",), none)),
        (several(mesh, none, ("cp",), ("tp",)), several(mesh, none, none, ("tp", "cp"))),
        (several(mesh, none, none, ("tp", "cp")), several(mesh, none, ("cp",), ("tp",))),
        (several(mesh, ("tp", "cp"), none), several(mesh, ("cp", "tp"), none)),
        (several(mesh, none, none, partial="cp tp"), several(mesh, ("cp",), ("tp",))),
        (several(mesh, none, none, partial="cp tp"), several(mesh, none, none, live="")),
        (several(mesh, none, ("tp",)), several(mesh, ("cp",), none, live="cp")),
        (several(mesh, none, none, live=""), several(mesh, none, ("tp",), partial="cp")),
    ]


@pytest.mark.quick
def test_several_axes_on_real_ranks() -> None:
    assert_edges(4, several_axes(Mesh(cp=2, tp=2)))


def test_several_axes_on_eight_ranks() -> None:
    mesh = Mesh(dp=2, cp=2, tp=2)
    assert_edges(8, several_axes(mesh))


def integers_cross() -> torch.Tensor:
    source, target = one_axis(2, "S"), one_axis(2, "I")
    mine = torch.arange(64).view(4, 16) + 64 * dist.get_rank()
    return BoundEdge(source.mesh, edge_steps(source, target))(mine)


@pytest.mark.quick
def test_integer_tensors_cross_without_gradient() -> None:
    for out in pool(2).run(integers_cross):
        assert torch.equal(out, torch.arange(128).view(8, 16))


def permuted_on_ranks() -> list[bool]:
    """Tensors whose dims lie in memory in another order, as transposed heads do, against contiguous ones."""
    from dtensor_lm import collectives as c

    g = c.group_of(Mesh(tp=2), ("tp",))
    x = torch.arange(2 * 4 * 6 * 8, dtype=torch.float64).view(2, 4, 6, 8) * (g.index + 1)
    other = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert not other.is_contiguous()
    calls = [
        lambda t: c.all_gather(t, g, 2),
        lambda t: c.reduce_scatter(t, g, 2),
        lambda t: c.reduce_scatter(t, g, 0),
        lambda t: c.all_reduce(t, g),
        lambda t: c.all_to_all(t, g, 1, 2),
        lambda t: c.all_to_all(t, g, 2, 0),
    ]
    return [torch.equal(call(other), call(x)) for call in calls]


def test_collectives_of_permuted_tensors() -> None:
    """torch 2.11 refuses them, and `torch.cat` keeps the order of strides."""
    assert all(all(found) for found in pool(2).run(permuted_on_ranks))
