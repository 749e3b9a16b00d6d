"""Every way in which a plan can fail to fit a model and a mesh, found all at once."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping

from dtensor_lm.errors import PlanError, nearest
from dtensor_lm.mesh import Mesh
from dtensor_lm.sharding_plans.plan import TABLES, Plan
from dtensor_lm.trace import Trace

_LAYER = re.compile(r"(^|(?<=\.))\d+(?=[.:]|$)")
# What these axes would be, and what there is instead.
NOT_BUILT = {
    "cp": ("context parallelism", "use tp, which also cuts the sequence between its regions"),
    "ep": ("expert parallelism", "use fsdp, which shards every parameter"),
}
LAYERS = "layers"  # the name that a plan sends to the pipeline's axis; no tensor has it
SEQUENCE = ("seq", "res", "q_seq", "kv_seq")


def generic(path: str) -> str:
    """A path with the numbers of repeated layers as `*`."""
    return _LAYER.sub("*", path)


class Checks:
    """Collects faults; the same fault at several paths, repeated layers above all, is shown once."""

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
        self.faults: dict[str, dict[str, str]] = {}  # text -> path -> more, said where there is one path only
        self.known = frozenset(n for _, every in names.values() for n in every)
        self.stored = frozenset(n for use in record.uses for n in use.spec.names)

    def add(self, path: str, text: str, more: str = "") -> None:
        self.faults.setdefault(text, {}).setdefault(generic(path), more)

    def raise_faults(self) -> None:
        faults = []
        for text, places in self.faults.items():
            paths = [path for path in places if path]
            where = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
            more = next(iter(places.values())) if len(places) == 1 else ""
            faults.append((f"{where}: " if where else "") + text + more)
        if faults:
            mesh = str(self.mesh.whole) or "(one process)"
            raise PlanError(f"the plan does not fit this model on mesh {mesh}:", faults)

    def axes(self, table: str, name: str) -> tuple[str, ...]:
        return tuple(axis for axis in self.plan.axes(table, name) if self.mesh[axis] > 1)

    def run(self) -> None:
        self._unknown_names()
        self._idle_axes()
        self._prefixes()
        self._batch()
        self._divisible()
        fused = self._fused()
        self._regions(fused)
        self._two_dims()

    def _unknown_names(self) -> None:
        for name in sorted(self.plan.names - self.plan.optional):
            tables = [table for table in TABLES if name in getattr(self.plan, table)]
            if name == LAYERS:
                for table in (table for table in tables if table != "compute"):
                    self.add("", f"{table}: {name}: layers go over a pipeline in compute, and only there: take it out")
            elif name not in self.known:
                self.add(
                    "",
                    f"{'/'.join(tables)}: the model has no dimension called {name!r}"
                    f"{nearest(name, self.known)}{self._parameter_like(name)}; it has {', '.join(sorted(self.known))}",
                )
            elif name not in self.stored and tables != ["compute"]:
                rows = "/".join(table for table in tables if table != "compute")
                self.add(
                    "",
                    f"{rows}: no parameter has the dimension {name!r}; "
                    f"parameters have {', '.join(sorted(self.stored))}",
                )

    def _parameter_like(self, name: str) -> str:
        """For the name of a parameter or module: that plans name dims, and those of the parameter nearest to it."""
        dims = {}
        for use in self.trace.uses:
            path = generic(f"{use.region}.{use.local}".lstrip("."))
            dims[path] = " ".join(d[0] if len(d) == 1 else f"({' '.join(d)})" for d in use.spec.dims)
        parts = {part for path in dims for part in path.split(".")}
        if not parts.intersection(name.split(".")) and "." not in name and "*" not in name:
            return ""
        inside = [path for path in dims if f".{generic(name)}." in f".{path}."]
        near = inside or difflib.get_close_matches(generic(name), dims, n=1, cutoff=0.0)
        return f": a plan names dimensions of tensors, and {near[0]} has {dims[near[0]] or 'none'}"

    def _idle_axes(self) -> None:
        planned = {a for table in TABLES for name in self.plan.names for a in self.plan.axes(table, name)}
        used = {
            axis
            for table in TABLES
            for name in (self.known if table == "compute" else self.stored)
            for axis in self.axes(table, name)
        }
        used |= {axis for table in TABLES for axis in self.axes(table, LAYERS)}
        for axis in self.mesh.active:
            if axis not in used:
                if axis in NOT_BUILT:
                    what, instead = NOT_BUILT[axis]
                    self.add("", f"axis {axis}={self.mesh[axis]}: {what} is not built yet: {instead}")
                    continue
                near = "" if axis in planned else nearest(axis, planned - set(self.mesh.whole))
                self.add(
                    "",
                    f"axis {axis}={self.mesh[axis]} shards nothing{near}: "
                    f"give it a name in the plan, or take it off the mesh (the plan uses "
                    f"{', '.join(sorted(planned)) or 'no axis'})",
                )

    def _prefixes(self) -> None:
        for name in sorted(self.plan.names & self.known):
            rows = {table: self.axes(table, name) for table in TABLES}
            for table, befores in (
                ("storage", ["compute"]),
                ("gradients", ["compute"]),
                ("optimizer", ["storage", "gradients"]),
            ):
                broken = [b for b in befores if rows[table][: len(rows[b])] != rows[b]]
                if not broken:
                    continue
                first, *others = sorted((rows[b] for b in befores), key=len, reverse=True)
                if any(first[: len(other)] != other for other in others):
                    storage, gradients = _show(rows["storage"]), _show(rows["gradients"])
                    self.add(
                        "",
                        f"{name} -> {storage} in storage and {gradients} in "
                        "gradients: one must begin with the other, since optimizer begins with "
                        "both",
                    )
                    continue
                repaired = first + tuple(axis for axis in rows[table] if axis not in first)
                said = " and ".join(f"{b}, {_show(rows[b])}" for b in broken[:1])
                self.add(
                    "",
                    f"{table}: {name} -> {_show(rows[table])} must begin with its axes in {said}: "
                    f"write {_show(repaired)}",
                )

    def _divisible(self) -> None:
        """Compute cuts are even. A dim with one name outside of a region and one inside is one fault."""
        outer = self._outer_names()
        found: dict[tuple[str, int, tuple[str, ...]], dict[str, str]] = {}
        for path, sizes in self.trace.sizes.items():
            for name, size in sizes.items():
                axes = self.axes("compute", name)
                if name != "batch" and size % self.mesh.product(axes):
                    first = outer.get(name, name)
                    key = (first if self.axes("compute", first) == axes else name, size, axes)
                    found.setdefault(key, {}).setdefault(name, path)
        for (_, size, axes), places in found.items():
            names, path = list(places), next(iter(places.values()))
            parts = self.mesh.product(axes)
            where = f"{axes[0]}={parts}" if len(axes) == 1 else f"{_show(axes)} of {parts} in all"
            what = " and ".join(names)
            if names[0] in SEQUENCE:
                self.add(
                    "",
                    f"{what}: a sequence of {size} does not divide over {where}: "
                    f"use a length of {_around(size, parts)}",
                )
            else:
                self.add(
                    path,
                    f"{what}: {size} does not divide over {where}{self._paired(path, names)}: "
                    f"use {names[0]} of {_around(size, parts)}, or {self._sizes(axes, parts)}"
                    f"{self._whole(names, axes)}",
                )

    def _batch(self) -> None:
        axes = self.axes("compute", "batch")
        parts = self.mesh.product(axes)
        if self.batch % (parts * self.micro):
            split = f" in {self.micro} micro-batches" if self.micro > 1 else ""
            over = (
                f" over {_show(axes)} of {parts} in all"
                if len(axes) > 1
                else f" over {axes[0]}={parts}"
                if axes
                else ""
            )
            self.add(
                "",
                f"batch: {self.batch} sequences{split} do not divide{over}: "
                f"use a batch of {_around(self.batch, parts * self.micro)}",
            )

    def _outer_names(self) -> dict[str, str]:
        """Inner name -> the name of the same dim outside of the region that has it, where they differ."""
        pairs: dict[str, str] = {}
        for path in self.trace.regions:
            region = self.trace.region(path)
            for crossing in (*region.inputs.values(), *region.outputs):
                for inner, outer in zip(crossing.inner.dims, crossing.outer.dims, strict=False):
                    if inner != outer and len(inner) == len(outer) == 1:
                        pairs.setdefault(inner[0], outer[0])
        return pairs

    def _paired(self, path: str, names: list[str]) -> str:
        """Sizes of the names that are cut together with these, such as the query heads of kv heads."""
        sizes = self.trace.sizes[path]
        bundles = [cut for cut in self.trace.region(path).cuts if len(cut) > 1 and names[0] in cut]
        others = sorted({n for cut in bundles for n in cut if n in sizes} - set(names))
        return f" ({', '.join(f'{n}: {sizes[n]}' for n in others)})" if others else ""

    def _sizes(self, axes: tuple[str, ...], parts: int) -> str:
        """The sizes of the axes that divide every dim that they cut, around the one that was asked for."""
        common = math.gcd(
            *(
                size * (self.micro if name == "batch" else 1)
                for sizes in self.trace.sizes.values()
                for name, size in sizes.items()
                if self.axes("compute", name) == axes
            )
        )
        works = [str(d) for d in range(1, min(common, 2 * parts) + 1) if common % d == 0]
        text = " or ".join(filter(None, (", ".join(works[:-1]), works[-1])))
        return f"{axes[0]} of {text}" if len(axes) == 1 else f"{_show(axes)} of {text} in all"

    def _whole(self, names: list[str], axes: tuple[str, ...]) -> str:
        """The repair that leaves the names whole, where every region can then still be cut."""
        for axis in axes:
            for path, (_, every) in self.names.items():
                cut = frozenset(n for n in every if axis in self.axes("compute", n))
                rest = cut - set(names)
                if rest and rest != cut and rest not in self.trace.region(path).cuts:
                    return ""
        return f", or leave it whole: {' and '.join(names)} -> ()"

    def _fused(self) -> frozenset[str]:
        """Of a fused dim only the first name can be cut. Returns the names that broke this."""
        broken = set()
        for path, dims, tables in self._all_dims():
            for names in (names for names in dims if names != ("_",)):
                for inner in names[1:]:
                    table = next((t for t in tables if self.axes(t, inner)), None)
                    if table:
                        broken.add(inner)
                        self.add(
                            path,
                            f"{table}: {inner} -> {_show(self.axes(table, inner))} would cut "
                            "inside the fused "
                            f"dims that it stands in: {inner} -> ()",
                            f" (only {names[0]} of ({' '.join(names)}) can be cut)",
                        )
        return frozenset(broken)

    def _regions(self, fused: frozenset[str]) -> None:
        """One axis serves one lawful cut in a region."""
        for path, (_, every) in self.names.items():
            region = self.trace.region(path)
            for axis in self.mesh.active:
                cut = frozenset(name for name in every if axis in self.axes("compute", name)) - fused
                if not cut or cut in region.cuts:
                    continue
                kind = type(self.trace.regions[path]).__name__
                allowed = ", ".join(sorted("+".join(sorted(c)) for c in region.cuts)) or "nothing"
                bundles = sorted("+".join(sorted(c)) for c in region.cuts if cut < c)
                if len(cut) == 1:
                    (name,) = cut
                    together = f", or cut {' or '.join(bundles)} together" if bundles else ""
                    rest = tuple(a for a in self.axes("compute", name) if a != axis)
                    self.add(
                        path,
                        f"needs {name} whole, but the plan cuts it by axis {axis}: {name} -> {_show(rest)}{together}",
                        f" ({kind} may be cut by {allowed})",
                    )
                else:
                    self.add(
                        path,
                        f"axis {axis} would cut {' and '.join(sorted(cut))} of one region, and an "
                        "axis serves "
                        f"one cut: take it off all but one",
                        f" ({kind} may be cut by {allowed})",
                    )
            for bundle in (cut for cut in region.cuts if len(cut) > 1):
                self._bundle(path, sorted(bundle))

    def _bundle(self, path: str, names: list[str]) -> None:
        """Axes that cut names together come first on each of them, or blocks would not match."""
        tuples = {name: self.axes("compute", name) for name in names}
        shared = frozenset.intersection(*(frozenset(t) for t in tuples.values()))
        heads = {t[: len(shared)] for t in tuples.values()}
        if len(heads) > 1:
            rows = "; ".join(f"{name} -> {_show(t)}" for name, t in tuples.items())
            begin = tuple(axis for axis in max(tuples.values(), key=len) if axis in shared)
            repaired = "; ".join(
                f"{name} -> {_show(begin + tuple(axis for axis in t if axis not in shared))}"
                for name, t in tuples.items()
            )
            self.add(
                path,
                f"{rows}: axes that cut them together come first and in the same order: write {repaired}",
            )

    def _all_dims(self) -> Iterator[tuple[str, tuple[tuple[str, ...], ...], tuple[str, ...]]]:
        """Path, dims and tables of every tensor."""
        for use in self.trace.uses:
            yield f"{use.region}.{use.local}" if use.region else use.local, use.spec.dims, TABLES
        for path in self.trace.regions:
            region = self.trace.region(path)
            for name, crossing in region.inputs.items():
                yield f"{path}.{name}" if path else name, crossing.inner.dims, ("compute",)
            for crossing in region.outputs:
                yield f"{path}.output" if path else "output", crossing.inner.dims, ("compute",)

    def _two_dims(self) -> None:
        """An axis cuts one dim of a tensor at most. (Two dims cut in compute are two cuts of a region.)"""
        for path, dims, tables in self._all_dims():
            told: set[tuple[str, str, str]] = set()
            names = [dim[0] for dim in dims if dim[0] != "_"]
            for table in tables:
                for axis in self.mesh.active:
                    one, *rest = [name for name in names if axis in self.axes(table, name)] or [""]
                    for other in rest:
                        if (axis, one, other) not in told and table != "compute":
                            self.add(
                                path,
                                f"{table}: axis {axis} would cut two dims of one tensor, {one} "
                                f"and {other}: "
                                f"take it off one of them",
                            )
                        told.add((axis, one, other))


def _show(axes: tuple[str, ...]) -> str:
    return f"({', '.join(axes)})"


def _around(size: int, unit: int) -> str:
    """The nearest multiples of `unit`."""
    low = size // unit * unit
    return f"{low} or {low + unit}" if low else str(unit)
