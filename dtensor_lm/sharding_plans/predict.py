"""The collectives on parameters and gradients that a Program predicts: per unit, and once a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from dtensor_lm.edges import Collective
from dtensor_lm.layout import ITEMSIZE, Layout
from dtensor_lm.mesh import Mesh
from dtensor_lm.sharding_plans.program import Gather, Hop, Parameter, hops

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
        return numel * ITEMSIZE[self.dtype] * (1 if self.op == "all_reduce" else self.axes_size)

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
            if g.regather and g.backward:
                yield Collective(r.op, r.axes, r.dtype, r.bytes, g.count, "backward", where + " again")
        for r in backward:
            if r.op == "reduce_scatter" and g.backward:
                yield Collective(r.op, r.axes, r.dtype, r.bytes, g.count, "backward", f"{g.unit or 'model'}: gradients")


def reduction_rounds(parameters: Mapping[str, Parameter]) -> tuple[list[Round], list[Round]]:
    """Once a step: gradients to the optimizer's layout, then one all-reduce per distinct set of axes."""
    dtype = next(iter(parameters.values())).gradients.dtype
    scatter = scatter_rounds({n: (p.gradients, p.optimizer) for n, p in parameters.items()}, dtype)
    sets: dict[tuple[str, ...], dict[str, tuple[Layout, Layout, int]]] = {}
    for name, p in parameters.items():
        if p.reduced_axes:
            sets.setdefault(p.reduced_axes, {})[name] = (p.optimizer, p.optimizer, 0)
    return scatter, [Round("all_reduce", axes, dtype, members) for axes, members in sets.items()]


def update_rounds(parameters: Mapping[str, Parameter]) -> list[Round]:
    """Once a step: updated parameters from the optimizer's layout back to storage."""
    dtype = next(iter(parameters.values())).storage.dtype
    return gather_rounds({n: (replace(p.optimizer, dtype=dtype), p.storage) for n, p in parameters.items()}, dtype)


def step_collectives(parameters: Mapping[str, Parameter], mesh: Mesh) -> Iterator[Collective]:
    scatter, reduce = reduction_rounds(parameters)
    for r in (*scatter, *reduce):
        if r.op != "slice":
            yield Collective(r.op, r.axes, r.dtype, r.bytes, 1, "step", "gradients")
    if mesh.active:
        yield Collective("all_reduce", mesh.active, "float64", 8 * STATISTICS, 1, "step", "norm, loss and token count")
    for r in update_rounds(parameters):
        yield Collective(r.op, r.axes, r.dtype, r.bytes, 1, "step", "updated parameters")
