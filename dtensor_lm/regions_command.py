"""`dtensor-lm check --regions`: the law of regions for a model by name, or for one's own; what it prints."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

from torch import nn

from dtensor_lm.config import CheckConfig
from dtensor_lm.errors import ConfigError, UserError, nearest
from dtensor_lm.from_config import narrow_model_of
from dtensor_lm.initial_values import recipes
from dtensor_lm.mesh import Mesh
from dtensor_lm.region import is_region, signature
from dtensor_lm.sharding_plans.library import COMMON
from dtensor_lm.sharding_plans.plan import Plan
from dtensor_lm.sharding_plans.resolve import resolve

if TYPE_CHECKING:
    from dtensor_lm.testing import Report, Violation

MOST_PARAMETERS = 20_000_000  # every region is copied for each of up to 64 parts, in float64


def check_regions(config: CheckConfig) -> int:
    """Checks every declared cut in one process and prints the report. Returns 0 if all are lawful, else 1."""
    from dtensor_lm import testing
    from dtensor_lm.testing.recording import BATCH, SEQ

    model, sizes = narrow_model_of(config)
    count = sum(p.numel() for p in model.parameters())
    if count > MOST_PARAMETERS:
        raise ConfigError(
            f"--model {config.model} has {count:,} parameters, too many for a check in parts (at most "
            f"{MOST_PARAMETERS:,}): write a function that returns a narrow model of the same code"
        )
    tokens = {"batch": config.batch or BATCH, "seq": config.seq or SEQ}
    if is_region(model) and all(c.inner.kind != "float" for c in signature(model).inputs.values()):
        # What no plan can use is said first: random operators, calls, names. A piece of a model is checked without.
        resolve(model, Plan(), Mesh(), batch=tokens["batch"], seq=tokens["seq"])
    began = time.perf_counter()
    report = testing.check_regions(model, sizes=tokens, seed=config.seed)
    seconds = time.perf_counter() - began
    about = {"model": config.model, **tokens, "sizes": sizes, "parameters": count, "seconds": round(seconds, 3)}
    notes = _notes(model)
    print(json.dumps(data(report) | about | {"notes": notes}) if config.json else text(report, model, about, notes))
    return 0 if report.ok else 1


def data(report: Report) -> dict[str, Any]:
    """The report as JSON-able data. An error that is no number (nothing compares) is null."""
    return {
        "ok": report.ok,
        "checked": [{"region": r, "cut": c, "parts": ks} for (r, c), ks in _checked(report).items()],
        "violations": [{**vars(v), "error": v.error if math.isfinite(v.error) else None} for v in report.violations],
        "hints": [{"region": r, "cut": c} for r, c in report.hints],
        "unchecked": [{"region": r, "cut": c} for r, c in report.unchecked],
        "same": report.same,
    }


def _notes(model: nn.Module) -> list[str]:
    """What the law does not see: names that look misspelt, initial values that ranks cannot draw."""
    signatures = [signature(m) for m in model.modules() if is_region(m)]
    specs = [spec for s in signatures for c in (*s.inputs.values(), *s.outputs) for spec in (c.outer, c.inner)]
    specs += [spec for s in signatures for spec in s.params.values()]
    names = {name for spec in specs for name in (*spec.names, *spec.sums)}
    odd = {name: near for name in sorted(names - COMMON) if (near := nearest(name, COMMON))}
    notes = [f"the name {name!r} is known to no ready plan{near}" for name, near in odd.items()]
    try:
        recipes(model)
    except UserError as error:
        notes += error.faults
    return notes


def text(report: Report, model: nn.Module, about: dict[str, Any], notes: list[str]) -> str:
    """The report for a person: the verdict, what was checked, and each violation once with its repair."""
    checked = _checked(report)
    regions = list(dict.fromkeys(r for r, _ in checked))
    verdict = "lawful" if report.ok else "NOT lawful"
    sizes = " ".join(f"{name}={value}" for name, value in about["sizes"].items())
    sizes = sizes and f"{sizes}; "
    lines = [
        f"{verdict}: {about['model']}{', narrow' if sizes else ''}: {len(checked)} cuts of {len(regions)} regions, "
        f"{len(report.checked)} runs in parts, {about['seconds']:.1f} seconds",
        f"  {sizes}{about['parameters']:,} parameters; {about['batch']} x {about['seq']} tokens",
        "  each cut with its numbers of parts:",
    ]
    names = {r: f"{r or 'the model'} ({type(model.get_submodule(r)).__name__})" for r in regions}
    width = max(map(len, names.values()), default=0)
    for r in regions:
        same = sum(other == r for other in report.same.values())
        cuts = ", ".join(f"{c} {' '.join(map(str, ks))}" for (path, c), ks in checked.items() if path == r)
        lines.append(f"  {names[r]:{width}}  {cuts}{f'  (and {same} like it)' if same else ''}")
    lines += _violations(report)
    lines += [f"  not checked: {r or 'the model'}: {c}: no number of parts divides it" for r, c in report.unchecked]
    lines += [f"  hint: {r or 'the model'}: {c} is lawful too: it may be added to cuts" for r, c in report.hints]
    lines += [f"  note: {note}" for note in notes]
    return "\n".join(lines)


def _checked(report: Report) -> dict[tuple[str, str], list[int]]:
    """Numbers of parts by (region, cut)."""
    found: dict[tuple[str, str], list[int]] = {}
    for region, cut, k in report.checked:
        found.setdefault((region, cut), []).append(k)
    return found


def _violations(report: Report) -> list[str]:
    """One entry per region, cut and repair, with its tensors in the smallest number of parts that shows it."""
    groups: dict[tuple[str, str, str], list[Violation]] = {}
    for v in report.violations:
        groups.setdefault((v.region, v.cut, v.hint), []).append(v)
    lines = []
    for (region, cut, hint), every in groups.items():
        ks = sorted({v.k for v in every})
        lines.append(f"  VIOLATED {region or 'the model'}: {cut} cut in {' or '.join(map(str, ks))} parts: {hint}")
        for v in every:
            if v.k == ks[0]:
                error = v.detail or ("nothing compares" if math.isinf(v.error) else f"off by {v.error:.1e}")
                lines.append(f"    {v.tensor}: {error}")
    return lines
