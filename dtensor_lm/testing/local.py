"""The comparison with one device as one call: starts the ranks of a mesh on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dtensor_lm.mesh import Mesh
from dtensor_lm.sharding_plans.plan import Plan
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.sharding_plans.resolve import resolve
from dtensor_lm.testing.equivalence import Report, compare
from dtensor_lm.testing.workers import pool


def assert_equivalent(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    mesh: Mesh,
    *,
    steps: int = 3,
    seed: int = 0,
    timeout: float = 120.0,
    dtype: str = "float64",
    **sizes: Any,
) -> Report:
    """Raises AssertionError, with every difference, unless a mesh of local gloo ranks computes what one device does.

    model: on the meta device, of classes that another process can import (not of the interactive prompt), or a
    function that returns it; sizes: batch, seq and micro_batches, as `resolve` takes them. Compared are the loss, every
    gradient, the norm, parameters after `steps` steps of SGD and of AdamW with clipping, initial values, replicas, and
    the collectives of a real step. float32 and bfloat16 are held to the bounds of `dtensor_lm.testing.precision`.
    """
    built = model if isinstance(model, nn.Module) else model()
    program = resolve(built, plan, mesh, dtype=dtype, **sizes)
    report = pool(mesh.size).run(_compare, program, steps, seed, timeout=timeout)[0]
    if not report.ok:
        rows = "\n".join(f"  {name}: {value}" for name, value in report.as_dict().items())
        raise AssertionError(f"{type(built).__name__} on mesh {mesh} differs from one device:\n{rows}")
    return report


def _compare(program: Program, steps: int, seed: int) -> Report:
    return compare(program, steps=steps, seed=seed)
