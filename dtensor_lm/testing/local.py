"""The comparison with one device as one call: starts the ranks of a mesh on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dtensor_lm.mesh import Mesh
from dtensor_lm.sharding_plans.plan import Plan
from dtensor_lm.testing.equivalence import Report, compare
from dtensor_lm.testing.workers import pool


def assert_equivalent(
    build: Callable[[], nn.Module], plan: Plan, mesh: Mesh, *, steps: int = 3, seed: int = 0, timeout: float = 120.0,
    dtype: str = "float64", **sizes: Any,
) -> Report:  # fmt: skip
    """Raises AssertionError, with every difference, unless a mesh of local gloo ranks computes what one device does.

    build: a module-level function that returns the model on the meta device (each rank builds its own); sizes: batch,
    seq and micro_batches, as `resolve` takes them. Compared are the loss, every gradient, the norm, parameters after
    `steps` steps of SGD and of AdamW with clipping, initial values, replicas, and the collectives of a real step.
    """
    report = pool(mesh.size).run(_compare, build, plan, mesh, steps, seed, dtype, sizes, timeout=timeout)[0]
    if not report.ok:
        rows = "\n".join(f"  {name}: {value}" for name, value in report.as_dict().items())
        raise AssertionError(f"{build.__name__} on mesh {mesh} differs from one device:\n{rows}")
    return report


def _compare(
    build: Callable[[], nn.Module], plan: Plan, mesh: Mesh, steps: int, seed: int, dtype: str, sizes: dict[str, Any]
) -> Report:
    from dtensor_lm.sharding_plans.resolve import resolve

    program = resolve(build(), plan, mesh, dtype=dtype, **sizes)
    return compare(program, steps=steps, seed=seed)
