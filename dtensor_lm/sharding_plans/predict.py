"""The collectives on parameters and gradients that a Program predicts: per unit, and once a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from dtensor_lm.edges import Collective, collectives
from dtensor_lm.layout import ITEMSIZE, Layout
from dtensor_lm.sharding_plans.program import Gather, Hop, Parameter, Program, hops

STATISTICS = 3  # sum of squares, loss and token count travel in one float64 all-reduce


def peel(layout: Layout, hop: Hop) -> Layout:
    """The layout without its innermost axis on one dim."""
    dims = list(layout.dims)
    assert dims[hop.dim].axes[-1] == hop.axis
    dims[hop.dim] = replace(dims[hop.dim], axes=dims[hop.dim].axes[:-1])
    return replace(layout, dims=tuple(dims))


@dataclass(frozen=True)
class Round:
    """Tensors that share one collective over one axis: name -> (cut layout, whole layout, dim)."""

    op: str
    axes: tuple[str, ...]
    dtype: str
    members: Mapping[str, tuple[Layout, Layout, int]]

    @property
    def bytes(self) -> int:
        """Of the larger side; every part is padded to the largest, so that ranks agree."""
        numel = sum(cut.local_numel() for cut, _, _ in self.members.values())
        return numel * ITEMSIZE[self.dtype] * (1 if self.op in ("all_reduce", "send") else self.axes_size)

    @property
    def axes_size(self) -> int:
        first = next(iter(self.members.values()))
        return first[0].mesh.product(self.axes)


def gather_rounds(layouts: Mapping[str, tuple[Layout, Layout]], dtype: str) -> list[Round]:
    """All-gathers that take each tensor from its first layout to its second, inner axes first; one per round and
    axis. layouts: name -> (cut, less cut)."""
    return list(_rounds({n: (cut, hops(whole, cut)) for n, (cut, whole) in layouts.items()}, "all_gather", dtype))


def scatter_rounds(layouts: Mapping[str, tuple[Layout, Layout]], dtype: str) -> list[Round]:
    """Reduce-scatters (slices where the values are equal, state I) from less cut to cut: the rounds of the gather,
    backwards. layouts: name -> (less cut, cut)."""
    rounds = list(_rounds({n: (cut, hops(whole, cut)) for n, (whole, cut) in layouts.items()}, "scatter", dtype))
    split: list[Round] = []
    for r in reversed(rounds):
        for op, state in (("reduce_scatter", "R"), ("slice", "I")):
            members = {n: m for n, m in r.members.items() if m[1].state(r.axes[0]) == state}
            if members:
                split.append(replace(r, op=op, members=members))
    return split


def _rounds(cuts: Mapping[str, tuple[Layout, tuple[Hop, ...]]], op: str, dtype: str) -> Iterator[Round]:
    left = {name: (layout, list(path)) for name, (layout, path) in cuts.items() if path}
    while left:
        by_axis: dict[str, dict[str, tuple[Layout, Layout, int]]] = {}
        for name, (layout, path) in left.items():
            hop = path.pop()
            whole = peel(layout, hop)
            by_axis.setdefault(hop.axis, {})[name] = (layout, whole, hop.dim)
        for axis, members in by_axis.items():
            yield Round(op, (axis,), dtype, members)
        left = {n: (by_axis[a][n][1], path) for a in by_axis for n in by_axis[a] if (path := left[n][1])}


def unit_collectives(gathers: Iterable[Gather], parameters: Mapping[str, Parameter]) -> Iterator[Collective]:
    for g in gathers:
        members = {name: parameters[name] for name in g.parameters}
        first = next(iter(members.values()))
        forward = gather_rounds({n: (p.storage, p.gathered) for n, p in members.items()}, first.storage.dtype)
        backward = scatter_rounds({n: (p.gathered, p.gradients) for n, p in members.items()}, first.gradients.dtype)
        where = f"{g.unit or 'model'}: parameters"
        for r in forward:
            yield Collective(r.op, r.axes, r.dtype, r.bytes, g.count, "forward", where)
            if g.again:
                yield Collective(r.op, r.axes, r.dtype, r.bytes, g.again, "backward", where + " again")
        for r in backward:
            if r.op == "reduce_scatter" and g.backward:
                yield Collective(r.op, r.axes, r.dtype, r.bytes, g.count, "backward", f"{g.unit or 'model'}: gradients")


def reduction_rounds(parameters: Mapping[str, Parameter]) -> tuple[list[Round], list[Round]]:
    """Once a step: gradients to the optimizer's layout, then one all-reduce per distinct set of axes."""
    if not parameters:
        return [], []
    dtype = next(iter(parameters.values())).gradients.dtype
    scatter = scatter_rounds({n: (p.gradients, p.optimizer) for n, p in parameters.items()}, dtype)
    sets: dict[tuple[str, ...], dict[str, tuple[Layout, Layout, int]]] = {}
    for name, p in parameters.items():
        if p.reduced_axes:
            sets.setdefault(p.reduced_axes, {})[name] = (p.optimizer, p.optimizer, 0)
    return scatter, [Round("all_reduce", axes, dtype, members) for axes, members in sets.items()]


def update_rounds(parameters: Mapping[str, Parameter]) -> list[Round]:
    """Once a step: updated parameters from the optimizer's layout back to storage."""
    if not parameters:
        return []
    dtype = next(iter(parameters.values())).storage.dtype
    return gather_rounds({n: (replace(p.optimizer, dtype=dtype), p.storage) for n, p in parameters.items()}, dtype)


def micro_batch_collectives(program: Program) -> Iterator[Collective]:
    """Of all forwards and backwards of a step: of regions, edges and parameters."""
    for region in program.regions.values():
        yield from region.exchanges
        for edge in region.edges:
            where = f"{edge.region or 'model'}: {edge.tensor}"
            yield from collectives(edge.steps, edge.target.dtype, edge.count, where, edge.grad)
    yield from unit_collectives(program.gathers, program.parameters)


def _place(program: Program) -> int:
    """On the pipeline's axis, of the rank that a part is for."""
    assert program.pipeline is not None and program.held is not None
    return program.pipeline.stages[program.held[0]].rank


def group_axes(program: Program) -> set[tuple[str, ...]]:
    """The axes of every process group that some rank needs."""
    found: set[tuple[str, ...]] = {(axis,) for axis in program.mesh.active}
    found |= {step.axes for edge in program.edges for step in edge.steps}
    found |= {axes for region in program.regions.values() for axes in region.reducers.values()}
    return found | {p.reduced_axes for p in program.parameters.values()}


def shared_rounds(program: Program) -> list[tuple[tuple[int, ...], Round]]:
    """Once a step: sums, over the pipeline ranks that store them, of gradients in the optimizer's layout."""
    if program.pipeline is None:
        return []
    found = []
    for ranks, names in program.pipeline.shared().items():
        members = {n: (p.optimizer, p.optimizer, 0) for n in names if (p := program.parameters.get(n)) is not None}
        if members:
            found.append((ranks, Round("send", (program.pipeline.axis,), program.master_dtype, members)))
    return found


def step_collectives(program: Program) -> Iterator[Collective]:
    """Once a step."""
    scatter, reduce = reduction_rounds(program.parameters)
    for r in (*scatter, *reduce):
        if r.op != "slice":
            yield Collective(r.op, r.axes, r.dtype, r.bytes, 1, "step", "gradients")
    for places, r in shared_rounds(program):
        # Two ranks exchange; of more, the first adds up and sends back.
        count = len(places) - 1 if _place(program) == places[0] else 1
        yield Collective(r.op, r.axes, r.dtype, r.bytes, count, "step", "gradients of shared parameters")
    if program.mesh.active:
        what = "norm, loss and token count"
        yield Collective("all_reduce", program.mesh.active, "float64", 8 * STATISTICS, 1, "step", what)
    for r in update_rounds(program.parameters):
        yield Collective(r.op, r.axes, r.dtype, r.bytes, 1, "step", "updated parameters")
