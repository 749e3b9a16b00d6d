"""Faults in the algebra: meshes, layouts, edges, and the collectives that execute them."""

from __future__ import annotations

from .mutation import Mutation
from .says import FALSE, MIXED_UP, OTHER_ARRAY, gradients, report

ROW = "tests/test_edges.py::test_every_row"
REAL_ROWS = ("tests/test_edges.py::test_every_row_on_real_ranks[2]",)
BLOCKS = ("tests/test_layout.py::test_blocks_are_nested_chunks",)
SHARDS = ("tests/cases/test_token_weights.py::test_ranks_with_7_labels_and_1[3]",)
REPLICAS = ("tests/cases/test_token_weights.py::test_ranks_with_7_labels_and_1[0]",)

MUTATIONS = (
    Mutation(
        "edge-gather-transposed-to-slice", "edges.py",
        '("S", "R"): ("all_gather", "reduce_scatter")', '("S", "R"): ("all_gather", "slice")',
        "gradients of the other ranks are dropped behind an all-gather: the transpose of another row",
        (f"{ROW}[S0>R0-2]",), OTHER_ARRAY,
    ),
    Mutation(
        "edge-sum-reduced-twice", "edges.py",
        '("P", "I"): ("all_reduce", "nothing")', '("P", "I"): ("all_reduce", "all_reduce")',
        "gradients of a sum come out multiplied by the size of the axis",
        (f"{ROW}[P0>I0-2]",), OTHER_ARRAY,
    ),
    Mutation(
        "edge-reduction-dropped", "edges.py",
        '("I", "R"): ("nothing", "all_reduce")', '("I", "R"): ("nothing", "nothing")',
        "addends of a gradient are never summed",
        (f"{ROW}[I0>R0-2]",), OTHER_ARRAY,
    ),
    Mutation(
        "edge-gradient-on-every-rank", "edges.py",
        '("R", "I"): ("nothing", "keep_first")', '("R", "I"): ("nothing", "nothing")',
        "a whole gradient becomes an addend on every rank, and is counted once for each",
        (f"{ROW}[R0>I0-2]",), OTHER_ARRAY,
    ),
    Mutation(
        "edge-bias-on-every-rank", "edges.py",
        '("I", "P"): ("keep_first", "nothing")', '("I", "P"): ("nothing", "nothing")',
        "a bias inside a sum (+n) is added by every rank",
        (f"{ROW}[I0>P0-2]",), OTHER_ARRAY,
    ),
    Mutation(
        "edge-addends-sliced", "edges.py",
        '("P", "S"): ("reduce_scatter", "all_gather")', '("P", "S"): ("slice", "all_gather")',
        "a slice of this rank's addend is taken for a slice of the sum",
        (f"{ROW}[P0>S0-2]",), OTHER_ARRAY,
    ),
    Mutation(
        "edge-axes-off-in-wrong-order", "edges.py",
        "for axis in reversed(have[dim][keep:]):", "for axis in have[dim][keep:]:",
        "axes come off a dim at the outer end first: blocks are joined in another order",
        ("tests/test_edges.py::test_axes_come_off_and_go_on_at_the_inner_end",), "S>R@cp all_gather",
    ),
    Mutation(
        "edge-bytes-of-the-smaller-side", "edges.py",
        "forward = backward = small * mesh[axis]", "forward = backward = small",
        "an all-gather is predicted with the bytes of what goes in",
        (f"{ROW}[S0>R0-2]",), r"assert \d+ == ",
    ),
    Mutation(
        "edge-all-reduces-not-joined", "edges.py",
        "joined[last] = replace(old, axes=old.axes + step.axes)", "joined.append(step)",
        "all-reduces over several axes are one collective each",
        ("tests/test_edges.py::test_all_reduces_of_one_change_are_one",), "P>R@dp all_reduce",
    ),
    Mutation(
        "layout-block-off-by-one", "layout.py",
        "start + coordinate[axis] * chunk, stop)", "start + coordinate[axis] * chunk + 1, stop)",
        "a shard starts one row too late",
        ("tests/test_layout.py::test_every_rank_of_a_large_mesh",), r"\(1, 128\)|\(1, 129\)",
    ),
    Mutation(
        "layout-uneven-rounded-down", "layout.py",
        "chunk = -(-(stop - start) // mesh[axis])", "chunk = (stop - start) // mesh[axis]",
        "of a dim that an axis does not divide the last rows belong to nobody",
        BLOCKS, FALSE,
    ),
    Mutation(
        "layout-copies-count-cutting-axes", "layout.py",
        "for axis in self.mesh.active if axis not in self.cut)", "for axis in self.mesh.active)",
        "shards are taken for copies, so their part of the norm is divided away",
        ("tests/test_layout.py::test_states",), r"assert 12 == 3",
    ),
    Mutation(
        "layout-idle-axes-are-live", "layout.py",
        'return "R" if axis in self.live else "I"', 'return "R"',
        "gradients that are whole on every rank are taken for addends",
        ("tests/test_layout.py::test_states",), r"assert 'R' == 'I'",
    ),
    Mutation(
        "mesh-axes-swapped", "mesh.py",
        "for name in reversed(self._sizes):", "for name in self._sizes:",
        "ranks stand as if the first axis ran fastest",
        ("tests/test_mesh.py::test_places_and_groups",), r"assert \[0, ",
    ),
    Mutation(
        "mesh-group-in-wrong-order", "mesh.py",
        "for axis in reversed(axes):", "for axis in axes:",
        "the members of a group over several axes are swapped",
        ("tests/test_mesh.py::test_order_is_part_of_a_mesh",), r"\(0, 1, 2, 3, 4",
    ),
    Mutation(
        "groups-cached-by-size", "process_groups.py",
        "return _groups[ranks]", "return next(g for r, g in _groups.items() if len(r) == len(ranks))",
        "the group of one axis is used for another axis of the same size",
        ("tests/test_process_groups.py::test_members_of_groups",), r"AssertionError: \('tp', ",
    ),
    Mutation(
        "pad-at-the-wrong-place", "collectives.py",
        "out.narrow(dim, g.index * x.shape[dim]", "out.narrow(dim, (g.size - 1 - g.index) * x.shape[dim]",
        "the gradient of a slice lands in another rank's rows",
        REAL_ROWS, MIXED_UP,
    ),
    Mutation(
        "slice-of-the-first-rank", "collectives.py",
        "return x.chunk(g.size, dim)[g.index].contiguous()", "return x.chunk(g.size, dim)[0].contiguous()",
        "every rank takes the first slice",
        REAL_ROWS, MIXED_UP,
    ),
    Mutation(
        "all-to-all-joined-backwards", "collectives.py",
        "return torch.cat(out.chunk(g.size), gather)", "return torch.cat(out.chunk(g.size)[::-1], gather)",
        "an all-to-all joins what it got in the wrong order",
        REAL_ROWS, MIXED_UP,
    ),
    Mutation(
        "addend-kept-by-all", "collectives.py",
        "return x if g.index == 0 else torch.zeros_like(x)", "return x",
        "what only the first rank should keep stays on all",
        REAL_ROWS, MIXED_UP,
    ),
    Mutation(
        "round-shards-swapped", "rounds.py",
        "out[n] = torch.cat(parts, self.dims[n])", "out[n] = torch.cat(parts[::-1], self.dims[n])",
        "gathered shards of a parameter are joined in the wrong order",
        SHARDS, gradients(),
    ),
    Mutation(
        "round-gradients-not-reduced", "rounds.py",
        "parts = all_reduce(flat, self.group).split", "parts = flat.split",
        "replicas keep their own gradients",
        REPLICAS, r"assert \(|False = all\(",
    ),
    Mutation(
        "round-slice-of-the-first-rank", "rounds.py",
        "mine = self.group.index", "mine = 0",
        "every rank's optimizer gets the gradients of the first shard",
        ("tests/test_unusual_plans.py::test_equal_to_one_device[storage over an axis that computes nothing]",),
        report("max_grad_error"),
    ),
)  # fmt: skip
