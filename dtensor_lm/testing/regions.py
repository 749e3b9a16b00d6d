"""The law of regions, checked numerically: one process, float64, region by region and cut by cut.

    print(check_regions(models.build("tiny", layers=2)))

A region declares in `cuts` what may be cut. For each cut its tensors are cut into k parts, its code runs on
each part, and what the parts give must be what the whole gives, forward and backward. A region with regions
inside is checked as the function from (inputs, parameters, what inner regions gave) to (outputs, what inner
regions took). A model whose regions obey the law is right under every plan and mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dtensor_lm.region import TensorSpec
from dtensor_lm.testing.law import Cut, Fault, Piece
from dtensor_lm.testing.recording import random_batch, real_copy, record

MOST_PARTS = 64  # the largest number of parts that is tried unless `ks` says otherwise


@dataclass(frozen=True)
class Violation:
    """One tensor that breaks the law.

    k: the number of parts.
    tensor: `output 0`, `grad x`, `grad wq.weight`, `inner core.q` (what the region inside took), or
        `code` that raised on a part (`detail`).
    error: relative to the tensor's largest element, inf where nothing compares.
    hint: the one change of the signature that makes the cut lawful, found by trying, or what to leave out.
    """

    region: str
    cut: str
    k: int
    tensor: str
    error: float
    hint: str
    detail: str = ""

    def __str__(self) -> str:
        what = self.detail or f"off by {self.error:.1e} of its largest element"
        return f"{self.region or 'the model'}: {self.cut} cut by {self.k}: {self.tensor}: {what}; {self.hint}"


@dataclass
class Report:
    """What `check_regions` found.

    checked: (region, cut, k). unchecked: (region, cut) whose sizes no k divides.
    hints: (region, cut) that is lawful but not declared.
    same: regions that equal a checked one (class, settings, shapes) and were not run.
    """

    violations: list[Violation] = field(default_factory=list)
    checked: list[tuple[str, str, int]] = field(default_factory=list)
    unchecked: list[tuple[str, str]] = field(default_factory=list)
    hints: list[tuple[str, str]] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        cuts = len({(region, cut) for region, cut, _ in self.checked})
        regions = len({region for region, _, _ in self.checked})
        verdict = "lawful" if self.ok else f"{len(self.violations)} violations"
        lines = [f"{cuts} cuts of {regions} regions, {len(self.checked)} runs in parts: {verdict}"]
        lines += [f"  - {violation}" for violation in self.violations]
        lines += [f"  not checked: {r or 'the model'}: {cut}: no k divides it" for r, cut in self.unchecked]
        lines += [f"  hint: {r or 'the model'}: {cut} is lawful too: add it to cuts" for r, cut in self.hints]
        lines += [f"  {path} is the same as {other}" for path, other in self.same.items()]
        return "\n".join(lines)


def check_regions(
    model: nn.Module,
    batch: Mapping[str, Tensor] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    ks: Sequence[int] | None = None,
    seed: int = 0,
) -> Report:
    """Checks every region of `model` (itself a region, on the meta device or real) for every cut it declares.

    The model is copied; the copy is float64 on the CPU, in training mode, and all its parameters are random
    (zeros and ones of initial values hide faults). All parts of a region are in memory at once: take a narrow
    model of the same code. Dropout by `random` inputs is on. Equal layers are checked once.

    batch: inputs of the model by name; without it they are random, with `sizes` of names (batch 6, seq 12).
    ks: numbers of parts (2, 3 and the largest up to 64); those that do not divide a cut are left out.

    Raises `ModelError` where signatures contradict the code.
    """
    generator = torch.Generator().manual_seed(seed)
    model = real_copy(model, generator)
    arguments = batch if batch is not None else random_batch(model, sizes or {}, generator)
    arguments = {n: x.cpu().double() if x.is_floating_point() else x.cpu() for n, x in arguments.items()}
    report, seen = Report(), dict[Any, str]()
    with _one_thread():
        for call in record(model, arguments):
            other = seen.get(call.key())
            if other is None:
                seen[call.key()] = call.path
                _check(Piece(call, generator), report, ks)
            elif other != call.path:
                report.same[call.path] = other
    return report


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small operators: threads that wait for each other cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check(piece: Piece, report: Report, ks: Sequence[int] | None) -> None:
    path, region = piece.call.path, piece.region
    for f in piece.reproduced():
        hint = "alone it must give what it gives in the model (is it random? does an index change it?)"
        report.violations.append(Violation(path, "nothing", 1, f.tensor, f.error, hint))
    for cut in sorted(region.cuts, key=lambda c: (len(c), sorted(c))):
        if unknown := cut - {*piece.names()}:
            hint = f"remove {_text(cut)} from cuts: nothing here can be cut by {' or '.join(sorted(unknown))}"
            report.violations.append(Violation(path, _text(cut), 0, "cuts", math.inf, hint))
            continue
        found = {k: piece.faults(cut, k, piece.specs) for k in _numbers(piece, cut, ks)}
        report.checked += [(path, _text(cut), k) for k in found]
        if not found:
            report.unchecked.append((path, _text(cut)))
        before = {v.hint for v in report.violations if v.region == path}
        hint = _hint(piece, cut, found, before) if any(found.values()) else ""
        report.violations += [
            Violation(path, _text(cut), k, f.tensor, f.error, hint, f.detail)
            for k, faults in found.items()
            for f in faults
        ]
    for name in piece.names():
        cut = frozenset([name])
        numbers = _numbers(piece, cut, ks) if cut not in region.cuts else []
        if numbers and not any(piece.faults(cut, k, piece.specs) for k in numbers):
            report.hints.append((path, name))


def _numbers(piece: Piece, cut: Cut, ks: Sequence[int] | None) -> list[int]:
    """Numbers of parts that divide every name of the cut (a name that is only summed over has no size)."""
    divides = math.gcd(*(piece.sizes[name] for name in cut if name in piece.sizes))
    largest = max((k for k in range(1, MOST_PARTS + 1) if divides % k == 0), default=1) if divides else 1
    return sorted({k for k in (ks or (2, 3, largest)) if k > 1 and divides % k == 0})


def _text(cut: Cut) -> str:
    return "+".join(sorted(cut))


# ---- hints: the smallest change that repairs a signature ---------------------------------------------------


def _hint(piece: Piece, cut: Cut, found: Mapping[int, list[Fault]], before: set[str]) -> str:
    """`before`: hints of smaller cuts of the region, tried first."""
    lawful = [str(k) for k, faults in found.items() if not faults]
    k = next(k for k, faults in found.items() if faults)
    if not lawful:
        for text, specs in sorted(_edits(piece, cut), key=lambda edit: edit[0] not in before):
            if not piece.faults(cut, k, specs):
                return text
    text = f"remove {_text(cut)} from cuts"
    if lawful:
        return f"{text}: it is lawful in {', '.join(lawful)} parts only"
    if inner := _given_addends(piece, cut, k):
        return f"{inner} gets addends over {_text(cut)}: call it after this region, where they are summed"
    if any(_is_k_times(piece, f, k) for f in found[k]):
        text += " (or is an output a mean over it? a loss is the sum over tokens)"
    others = [cut | {name} for name in piece.names() if name not in cut]
    together = [c for c in others if k in _numbers(piece, c, [k]) and not piece.faults(c, k, piece.specs)]
    return f"{text}: lawful as {' or '.join(map(_text, together))}" if together else text


def _is_k_times(piece: Piece, fault: Fault, k: int) -> bool:
    """Whether a scalar output is about k times too large in k parts, as a mean is."""
    scalar = fault.tensor in piece.leave and not piece.specs[fault.tensor].dims
    return scalar and fault.tensor.startswith("output") and abs(fault.error - (k - 1)) < 0.2 * (k - 1)


def _given_addends(piece: Piece, cut: Cut, k: int) -> str:
    """The region inside that is given what is not summed yet, such as dropout after a linear that sums; '' if none."""
    for path, calls in piece.inner.items():
        labels = [n for label, _ in calls for n in piece.specs if n.startswith((f"{label}.", f"{label} output"))]
        specs = dict(piece.specs)
        for label in labels:
            spec = specs[label]
            if spec.kind == "float" and not cut.intersection((*spec.names, *spec.sums)):
                specs[label] = replace(spec, sums=(*spec.sums, *sorted(cut)))
        if not piece.faults(cut, k, specs):
            return path
    return ""


def _edits(piece: Piece, cut: Cut) -> Iterator[tuple[str, Mapping[str, TensorSpec]]]:
    """Signatures one mark away: sums of what leaves the region first, then addends that enter, then `=`."""
    labels = [label for label in (*piece.leave, *piece.enter) if piece.specs[label].kind == "float"]
    for label in labels:
        spec = piece.specs[label]
        for name in sorted(cut):
            if name in spec.sums:
                edited = replace(spec, sums=tuple(n for n in spec.sums if n != name))
                yield f"remove +{name} from {label}", {**piece.specs, label: edited}
            elif not cut.intersection(spec.names):
                edited = replace(spec, sums=(*spec.sums, name))
                yield f"add +{name} to {label}", {**piece.specs, label: edited}
    for label in labels:
        spec = piece.specs[label]
        text = f"take = off {label}" if spec.whole else f"mark {label} with ="
        yield text, {**piece.specs, label: replace(spec, whole=not spec.whole)}
