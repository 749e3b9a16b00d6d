"""What a run of the tests says at its end, beside pytest's own lines: one section per subject, only of what ran.

A section is a function from the reports of a run to (title, lines), or None where it has nothing to say.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import settings

from dtensor_lm import processes

# The same cases in every run; `--hypothesis-profile=deep` draws ten times as many, new ones each time.
settings.register_profile("project", derandomize=True, database=None, print_blob=True)
settings.register_profile("deep", max_examples=1000, derandomize=False, print_blob=True)
settings.load_profile("project")

# Tensors of tests are tiny, and workers are busy beside this process: threads that spin would cost more than all else.
torch.set_num_threads(1)

# A worker's first DTensor loads this module, a second of processor time in every worker: the fork server does it once.
processes.PRELOADED = (*processes.PRELOADED, "torch._dynamo")

Reports = Mapping[str, Sequence[pytest.TestReport]]  # by outcome: passed, failed, error, skipped
Section = tuple[str, list[str]] | None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        ids = {name for mark in item.iter_markers("case") for name in mark.args}
        item.user_properties += [("case", name) for name in sorted(ids)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    names = ("passed", "failed", "error", "skipped")
    reports = {name: terminalreporter.stats.get(name, []) for name in names}
    for section in (cases(reports), combinations(reports)):
        if section is not None:
            title, lines = section
            terminalreporter.section(title, sep="-")
            for line in lines:
                terminalreporter.write_line(line)


def cases(reports: Reports) -> Section:
    """Every case by its id with the number of its tests, those that failed first."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome, found in reports.items():
        for report in found:
            for key, name in getattr(report, "user_properties", ()):  # a file that fails to import has none
                if key == "case":
                    counts[name]["failed" if outcome == "error" else outcome] += 1
    if not counts:
        return None
    failed = sorted(name for name, count in counts.items() if count["failed"])
    lines = [f"FAILED {name}: {counts[name]['failed']} failed, {counts[name]['passed']} passed" for name in failed]
    others = []
    for name in sorted(set(counts) - set(failed)):
        skipped = f" ({counts[name]['skipped']} skipped)" if counts[name]["skipped"] else ""
        others.append(f"{name}: {counts[name]['passed']} passed{skipped}")
    lines += ["   ".join(others[i : i + 5]) for i in range(0, len(others), 5)]
    return f"cases that other systems failed: {len(counts) - len(failed)} pass, {len(failed)} fail", lines


def combinations(reports: Reports) -> Section:
    """How often generated cases had axes that do what; axes are joined by x, what one axis does by +."""
    counts: Counter[str] = Counter()
    for found in reports.values():
        for report in found:
            for key, text in getattr(report, "user_properties", ()):
                if key == "combinations":
                    counts.update(json.loads(text))
    if not counts:
        return None
    lines = [f"{count:5}  {name}" for name, count in counts.most_common()]
    return f"generated comparisons: {counts.total()} of {len(counts)} combinations of axes", lines
