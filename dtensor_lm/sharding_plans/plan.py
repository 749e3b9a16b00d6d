"""A plan is pure data: four tables from names to mesh axes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dtensor_lm.errors import PlanError, nearest

Axes = tuple[str, ...]
TABLES = ("compute", "storage", "gradients", "optimizer")
_WORD = re.compile(r"[a-z_][a-z0-9_]*\Z")
# A path or pattern of parameters, as other libraries take them: no model has such a dimension, and resolve says so.
_PATH = re.compile(r"[\w*]+(\.[\w*]+)*\Z")


@dataclass(frozen=True)
class Plan:
    """Names to mesh axes, outer to inner. Each table says only what differs from the one before it.

    compute: layouts inside regions. storage: parameters between uses (from compute). gradients: where
    gradients accumulate over micro-batches (from storage). optimizer: master weights and moments (from
    storage).
    optional: names that a model may lack; any other name that a model lacks is an error.
    regather: whether weights that storage cuts are released after forward and gathered again in backward.
    Axes that a mesh does not have count as size 1.
    """

    compute: Mapping[str, str | Axes] = field(default_factory=dict)
    storage: Mapping[str, str | Axes] = field(default_factory=dict)
    gradients: Mapping[str, str | Axes] = field(default_factory=dict)
    optimizer: Mapping[str, str | Axes] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    regather: bool = True

    def __post_init__(self) -> None:
        faults = []
        for table in TABLES:
            rows = {}
            for name, axes in dict(getattr(self, table)).items():
                row = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
                if not (isinstance(name, str) and _PATH.match(name) and all(map(_is_word, row))):
                    faults.append(
                        f"{table}: {name!r} -> {axes!r} is not a name and its axes, such as embed: "
                        "fsdp, or a "
                        f"list of axes, outer to inner, such as embed: [fsdp, dp]"
                    )
                elif len(set(row)) < len(row):
                    faults.append(f"{table}: {name} -> {axes!r} names an axis twice")
                else:
                    rows[name] = row
            object.__setattr__(self, table, rows)
        optional = self.optional
        if not isinstance(optional, (frozenset, set, list, tuple)) or not all(map(_is_word, optional)):
            faults.append(f"optional: {optional!r} is not a list of names")
        else:
            object.__setattr__(self, "optional", frozenset(optional))
        if faults:
            raise PlanError("this plan cannot be read:", faults)

    def axes(self, table: str, name: str) -> Axes:
        """The axes of a name in a table, with what the table does not say taken from the one it follows."""
        own: Mapping[str, Axes] = getattr(self, table)
        if name in own:
            return own[name]
        before = {"storage": "compute", "gradients": "storage", "optimizer": "storage"}.get(table)
        return self.axes(before, name) if before else ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for table in TABLES for name in getattr(self, table))

    def __or__(self, other: Plan) -> Plan:
        """Both plans together; a name stays optional unless one of them needs it.

        Raises `PlanError` where they disagree on a name.
        """
        faults, tables = [], {}
        for table in TABLES:
            mine, theirs = getattr(self, table), getattr(other, table)
            faults += [
                f"{table}: {name} is {_show(mine[name])} in one plan and {_show(theirs[name])} in the other"
                for name in mine.keys() & theirs.keys()
                if mine[name] != theirs[name]
            ]
            tables[table] = {**mine, **theirs}
        if faults:
            raise PlanError("these plans cannot be combined:", sorted(faults))
        needed = (self.names - self.optional) | (other.names - other.optional)
        optional = (self.optional | other.optional) - needed
        return Plan(**tables, optional=optional, regather=self.regather and other.regather)

    def as_dict(self) -> dict[str, object]:
        tables: dict[str, object] = {t: {n: list(a) for n, a in getattr(self, t).items()} for t in TABLES}
        return {**tables, "optional": sorted(self.optional), "regather": self.regather}

    @classmethod
    def from_dict(cls, data: object, where: str = "plan") -> Plan:
        """Reads what `as_dict` writes, or a mapping written by hand. Raises `PlanError` with every fault."""
        known = (*TABLES, "optional", "regather")
        if not isinstance(data, Mapping):
            raise PlanError(f"{where} is not a mapping with {', '.join(TABLES)}")
        faults = [f"unknown table {key!r}{nearest(str(key), known)}" for key in data if key not in known]
        tables: dict[str, Mapping[str, str | Axes]] = {}
        for table in TABLES:
            rows = data.get(table)
            if isinstance(rows, Mapping):
                tables[table] = rows
            elif rows is not None:
                faults.append(f"{table}: {rows!r} is not a mapping from names to their axes")
        regather, optional = data.get("regather", True), data.get("optional")
        if not isinstance(regather, bool):
            faults.append(f"regather: {regather!r} is neither true nor false")
        plan = None
        try:
            plan = cls(**tables, optional=() if optional is None else optional)  # type: ignore[arg-type]
        except PlanError as error:
            faults += error.faults
        if faults or plan is None:
            raise PlanError(f"{where} cannot be read:", faults)
        return replace(plan, regather=regather)


def _is_word(word: object) -> bool:
    return isinstance(word, str) and bool(_WORD.match(word))


def _show(axes: Axes) -> str:
    return f"({', '.join(axes)})"
