"""Every way in which a plan can fail to fit a model and a mesh, found all at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dtensor_lm.errors import PlanError, nearest
from dtensor_lm.mesh import Mesh
from dtensor_lm.sharding_plans.plan import TABLES, Plan
from dtensor_lm.trace import Trace

_LAYER = re.compile(r"(^|(?<=\.))\d+(?=[.:]|$)")
SEQUENCE = ("seq", "res", "q_seq", "kv_seq")


def generic(path: str) -> str:
    """A path with the numbers of repeated layers as `*`."""
    return _LAYER.sub("*", path)


class Checks:
    """Collects faults; equal ones of repeated layers become one."""

    def __init__(
        self,
        record: Trace,
        plan: Plan,
        mesh: Mesh,
        names: Mapping[str, tuple[frozenset[str], frozenset[str]]],
        batch: int,
        seq: int,
        micro: int,
    ) -> None:
        self.trace, self.plan, self.mesh, self.names = record, plan, mesh, names
        self.batch, self.seq, self.micro = batch, seq, micro
        self.faults: dict[str, None] = {}
        self.known = frozenset(n for _, every in names.values() for n in every)

    def add(self, path: str, text: str) -> None:
        where = generic(path)
        self.faults[f"{where}: {text}" if where else text] = None

    def raise_faults(self) -> None:
        if self.faults:
            raise PlanError(f"the plan does not fit this model on mesh {self.mesh or '(one process)'}:", [*self.faults])

    def axes(self, table: str, name: str) -> tuple[str, ...]:
        return tuple(axis for axis in self.plan.axes(table, name) if self.mesh[axis] > 1)

    def run(self) -> None:
        self._unknown_names()
        self._idle_axes()
        self._prefixes()
        self._divisible()
        self._regions()
        self._tensors()

    def _unknown_names(self) -> None:
        for name in sorted(self.plan.names - self.known - self.plan.optional):
            tables = [table for table in TABLES if name in getattr(self.plan, table)]
            self.add("", f"{'/'.join(tables)}: the model has no dimension called {name!r}{nearest(name, self.known)}; "
                         f"it has {', '.join(sorted(self.known))}")

    def _idle_axes(self) -> None:
        planned = {axis for table in TABLES for name in self.plan.names for axis in self.plan.axes(table, name)}
        used = {axis for table in TABLES for name in self.known for axis in self.axes(table, name)}
        for axis in self.mesh.active:
            if axis not in used:
                self.add("", f"axis {axis}={self.mesh[axis]} shards nothing{nearest(axis, planned - {axis})}: "
                             f"give it a name in the plan, or take it off the mesh (the plan uses "
                             f"{', '.join(sorted(planned)) or 'no axis'})")

    def _prefixes(self) -> None:
        rules = (("storage", "compute"), ("gradients", "compute"), ("optimizer", "storage"), ("optimizer", "gradients"))
        for name in sorted(self.plan.names & self.known):
            for table, before in rules:
                long, short = self.axes(table, name), self.axes(before, name)
                if long[: len(short)] != short:
                    repaired = short + tuple(axis for axis in long if axis not in short)
                    self.add("", f"{table}: {name} -> ({', '.join(long)}) must begin with its axes in {before}, "
                                 f"({', '.join(short)}): write ({', '.join(repaired)})")

    def _divisible(self) -> None:
        seen = set()
        for path, sizes in self.trace.sizes.items():
            for name, size in sizes.items():
                axes = self.axes("compute", name)
                parts = self.mesh.product(axes)
                if parts == 1 or size % parts == 0 or (name, size) in seen:
                    continue
                seen.add((name, size))
                where = f"{'.'.join(axes)}={parts}" if len(axes) == 1 else f"({', '.join(axes)}) of {parts} in all"
                if name == "batch":
                    unit = parts * self.micro
                    self.add("", f"batch: {self.batch} sequences in {self.micro} micro-batches do not divide over {where}"
                                 f": use {_around(self.batch, unit)} (a multiple of {unit})")
                elif name in SEQUENCE:
                    self.add("", f"{name}: a sequence of {size} does not divide over {where}: "
                                 f"use a length of {_around(size, parts)}")
                else:
                    works = [str(d) for d in range(1, size + 1) if size % d == 0 and d <= 2 * parts]
                    hint = " or leave kv heads whole: kv_heads and core_kv_heads -> ()" if "kv" in name else ""
                    self.add(path, f"{name}: {size} does not divide over {where}: {name} of {_around(size, parts)} works,"
                                   f" or {'.'.join(axes)} of {', '.join(works)}{hint}")

    def _regions(self) -> None:
        """One axis serves one lawful cut in a region."""
        for path, (_, every) in self.names.items():
            region = self.trace.region(path)
            for axis in self.mesh.active:
                cut = frozenset(name for name in every if axis in self.axes("compute", name))
                if not cut or cut in region.cuts:
                    continue
                kind = type(self.trace.regions[path]).__name__
                allowed = ", ".join(sorted("+".join(sorted(c)) for c in region.cuts)) or "nothing"
                if len(cut) == 1:
                    (name,) = cut
                    self.add(path, f"{kind} needs {name} whole, but the plan cuts it by axis {axis}; "
                                   f"it may be cut by: {allowed}")
                else:
                    self.add(path, f"axis {axis} would cut {' and '.join(sorted(cut))} of one {kind}: an axis serves one "
                                   f"cut in a region; put all but one on other axes (allowed: {allowed})")
            for bundle in (cut for cut in region.cuts if len(cut) > 1):
                self._bundle(path, sorted(bundle))

    def _bundle(self, path: str, names: list[str]) -> None:
        """Axes that cut names together come first on each of them, or blocks would not match."""
        tuples = {name: self.axes("compute", name) for name in names}
        shared = frozenset.intersection(*(frozenset(t) for t in tuples.values()))
        heads = {t[: len(shared)] for t in tuples.values()}
        if len(heads) > 1:
            rows = "; ".join(f"{name} -> ({', '.join(t)})" for name, t in tuples.items())
            self.add(path, f"{rows}: the axes that both share must come first and in the same order")

    def _tensors(self) -> None:
        for use in self.trace.uses:
            path = f"{use.region}.{use.local}" if use.region else use.local
            self._tensor(path, use.spec.dims, TABLES)
        for path in self.trace.regions:
            region = self.trace.region(path)
            for name, crossing in region.inputs.items():
                self._tensor(f"{path}.{name}" if path else name, crossing.inner.dims, ("compute",))
            for crossing in region.outputs:
                self._tensor(f"{path}.output" if path else "output", crossing.inner.dims, ("compute",))

    def _tensor(self, path: str, dims: Iterable[tuple[str, ...]], tables: Iterable[str]) -> None:
        for table in tables:
            owner: dict[str, str] = {}
            for names in dims:
                for inner in names[1:]:
                    if inner != "_" and self.axes(table, inner):
                        self.add(path, f"{table}: {inner} stands inside the fused dim ({' '.join(names)}); only "
                                       f"{names[0]} can be cut")
                for axis in self.axes(table, names[0]) if names[0] != "_" else ():
                    if axis in owner:
                        self.add(path, f"{table}: axis {axis} would cut two dims of one tensor, {owner[axis]} and "
                                       f"{names[0]}: leave it on one of them")
                    owner[axis] = names[0]


def _around(size: int, unit: int) -> str:
    """The nearest multiples of `unit`."""
    low = size // unit * unit
    return f"{low} or {low + unit}" if low else str(unit)
