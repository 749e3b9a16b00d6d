"""A failing case made small: by steps that know what a case is, each tried on real ranks, a few dozen runs in all.

Generic shrinkers see a case as choices of a generator and need thousands of tries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dtensor_lm.errors import UserError
from dtensor_lm.mesh import Mesh
from dtensor_lm.sharding_plans.plan import TABLES, Plan
from dtensor_lm.testing.case import Case, run
from dtensor_lm.testing.workers import WorkerError

MOST_TRIES = 150


def assert_case(case: Case) -> None:
    """Runs a case. Raises AssertionError with the report and the command of the smallest case that fails as it does."""
    failure = _failure(case)
    if failure is None:
        return
    small = smallest(case, lambda other: (found := _failure(other)) is not None and found[0] == failure[0])
    what = _failure(small) or failure
    raise AssertionError(f"{what[1]}\n{small.command()}\nfound as {case.command()}")


def _failure(case: Case) -> tuple[str, str] | None:
    """(kind, text) of how a case fails: it differs from one device, or a rank raises."""
    try:
        report = run(case)
    except WorkerError as error:
        return "raises", f"fails on its ranks: {error}"
    return None if report.ok else ("differs", f"not equal to one device: {report}")


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with everything left out without which it fails still. Cases that do not resolve are passed over."""
    tries, found = 0, True
    while found:
        found = False
        for other in simpler(case):
            try:
                other.program()
            except UserError:
                continue
            tries += 1
            if tries > MOST_TRIES:
                return case
            if fails(other):
                case, found = other, True
                break
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Cases one step simpler, the boldest steps first."""
    mesh, plan = Mesh.parse(case.mesh), Plan.from_dict(case.plan)
    for axis in mesh:
        sizes = {name: size for name, size in mesh.sizes.items() if name != axis}
        yield _on(case, plan, mesh, Mesh(**sizes))
    for axis in mesh.active:
        if mesh[axis] > 2:
            yield _on(case, plan, mesh, Mesh(**{**mesh.sizes, axis: 2}))
    if case.micro_batches > 1:
        yield replace(case, micro_batches=1, batch=case.batch // case.micro_batches)
    if case.accumulate > 1:
        yield replace(case, accumulate=1)
        yield replace(case, accumulate=1, micro_batches=case.micro_batches // case.accumulate)
    if case.virtual_stages > 1:
        yield replace(case, schedule="1f1b", virtual_stages=0)
    if case.schedule not in ("", "gpipe"):
        yield replace(case, schedule="gpipe", virtual_stages=0)
    for plainer in (replace(case, steps=0), replace(case, labels="all"), replace(case, seed=0)):
        if plainer != case:
            yield plainer
    for name, value in case.changes.items():
        plain: Any = 1 if name == "layers" else type(value)(0) if isinstance(value, bool | float) else value
        if value != plain:
            yield replace(case, changes={**case.changes, name: plain})
    least = mesh.product(plan.axes("compute", "batch")) * case.micro_batches
    if case.batch > least:
        yield replace(case, batch=least)
    for name in sorted(plan.names):
        yield replace(case, plan=_without(plan, name, TABLES))
        for table in TABLES:
            if name in getattr(plan, table):
                yield replace(case, plan=_without(plan, name, (table,)))
    if case.plan.get("regather", True):
        yield replace(case, plan={**case.plan, "regather": False})


def _on(case: Case, plan: Plan, before: Mesh, after: Mesh) -> Case:
    """The case on a smaller mesh; axes that are gone leave the plan, and ranks of the batch take their rows along."""
    rows = case.batch // before.product(plan.axes("compute", "batch"))
    tables = {t: {n: [a for a in axes if a in after] for n, axes in getattr(plan, t).items()} for t in TABLES}
    batch = rows * after.product(tables["compute"].get("batch", []))
    smaller = replace(case, mesh=str(after), batch=batch, plan={**case.plan, **tables})
    if after.product(tables["compute"].get("layers", [])) == 1:
        smaller = replace(smaller, schedule="", virtual_stages=0, accumulate=1)
    return smaller


def _without(plan: Plan, name: str, tables: tuple[str, ...]) -> Mapping[str, Any]:
    kept = {t: {n: list(a) for n, a in getattr(plan, t).items() if n != name or t not in tables} for t in TABLES}
    return {**plan.as_dict(), **kept}
