"""What is promised in float32 and bfloat16, where a mesh cannot equal one device: it adds in another order.

Both are compared with the exact result, float64 on one device at the same values. With e1 the distance of one device
(relative, by the 2-norm) and u the unit roundoff of the compute dtype (2^-24, 2^-8):

    a gradient         at most  2 e1 + u sqrt(ranks)    ranks addends meet in the compute dtype
    loss and norm      at most  2 e1 + u sqrt(3 calls)  calls of regions, of about three roundings each
    parameters, SGD    at most  2 e1 of their own, (2 max e1 + u sqrt(ranks)) of the way they went, and `steps`
                                roundings of the masters

The roundings of a sum are independent, so they grow with the root of their number (Higham and Mary 2019). AdamW
divides a gradient by its own size, so where that is nothing but rounding no bound holds: its copies are compared only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtensor_lm.sharding_plans.program import Program

if TYPE_CHECKING:
    from dtensor_lm.testing.equivalence import Reference, Report

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}
FLOOR = 1e-3  # of the largest norm: some gradients, such as that of a bias of keys, are zero but for rounding
Whole = Mapping[str, Tensor]


def judge_gradients(
    report: Report, program: Program, found: tuple[float, Whole, float], batch: Whole, exact: Reference, low: Reference
) -> float:
    """Fills errors and bounds of loss, gradients and norm. Returns the largest distance of one device's gradients."""
    u, ranks = ROUNDOFF[program.dtype], program.mesh.size
    (loss, grads, norm), (loss0, grads0, norm0) = found, exact.gradients(batch)
    loss1, grads1, norm1 = low.gradients(batch)
    calls = sum(len(r.outputs) for r in program.regions.values())
    path = u * math.sqrt(3 * calls)
    report.loss_error, one = _relative(loss, loss0), _relative(loss1, loss0)
    report.bounds["loss_error"] = 2 * one + path
    report.grad_norm_error, one = _relative(norm, norm0), _relative(norm1, norm0)
    report.bounds["grad_norm_error"] = 2 * one + path
    floor = FLOOR * max(float(g.double().norm()) for g in grads0.values())
    distances = {n: distance(grads[n], g, floor) for n, g in grads0.items()}
    ones = {n: distance(grads1[n], g, floor) for n, g in grads0.items()}
    bounds = {n: 2 * e + u * math.sqrt(ranks) for n, e in ones.items()}
    report.worst_gradient = worst = _worst({n: distances[n] / bounds[n] for n in bounds})
    report.max_grad_error, report.bounds["max_grad_error"] = distances[worst], bounds[worst]
    return max(ones.values())


def judge_parameters(
    report: Report, program: Program, found: tuple[Whole, Whole, Whole, Whole], largest: float, steps: int
) -> None:
    """Fills error and bound of the parameters after steps of SGD.

    found: the mesh's, the exact ones, one device's, and those before. largest: what `judge_gradients` returned.
    """
    trained, exact, one, before = found
    share = 2 * largest + ROUNDOFF[program.dtype] * math.sqrt(program.mesh.size)
    rounding = steps * ROUNDOFF[program.master_dtype]
    sizes = {n: float(p.double().norm()) or 1.0 for n, p in exact.items()}

    def apart(a: Whole, b: Whole, n: str) -> float:
        return float((a[n].double() - b[n].double()).norm())

    ways = {n: apart(exact, before, n) for n in exact}
    floor = FLOOR * max(ways.values())
    errors = {n: apart(trained, exact, n) / sizes[n] for n in exact}
    bounds = {n: (share * max(way, floor) + 2 * apart(one, exact, n)) / sizes[n] + rounding for n, way in ways.items()}
    report.worst_parameter = worst = _worst({n: errors[n] / bounds[n] for n in bounds})
    report.max_param_error, report.bounds["max_param_error"] = errors[worst], bounds[worst]


def distance(found: Tensor, exact: Tensor, floor: float = 0.0) -> float:
    """Of two tensors by the 2-norm, relative to the exact one (at least `floor`); NaN stays NaN."""
    size = max(float(exact.double().norm()), floor) or 1.0
    return float((found.double() - exact.double()).norm()) / size


def rounded(values: Whole, dtype: str) -> dict[str, Tensor]:
    """Values that the compute dtype holds exactly, so that masters and parameters begin equal."""
    return {n: v.to(getattr(torch, dtype)).to(v.dtype) for n, v in values.items()}


def _relative(found: float, exact: float) -> float:
    return abs(found - exact) / (abs(exact) or 1.0)


def _worst(ratios: Mapping[str, float]) -> str:
    return max(ratios, key=lambda n: math.inf if math.isnan(ratios[n]) else ratios[n])
