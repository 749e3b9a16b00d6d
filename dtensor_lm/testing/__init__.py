"""Proofs for models and plans: the law of regions, comparisons with one device, and workers to try things out with."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "Case": "case",
    "assert_case": "shrink",
    "assert_equivalent": "local",
    "check_regions": "regions",
    "pool": "workers",
    "Report": "regions",
    "Violation": "regions",
}

if TYPE_CHECKING:
    from dtensor_lm.testing.case import Case
    from dtensor_lm.testing.local import assert_equivalent
    from dtensor_lm.testing.regions import Report, Violation, check_regions
    from dtensor_lm.testing.shrink import assert_case
    from dtensor_lm.testing.workers import pool

__all__ = ["Case", "Report", "Violation", "assert_case", "assert_equivalent", "check_regions", "pool"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"dtensor_lm.testing.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'dtensor_lm.testing' has no attribute {name!r}")
