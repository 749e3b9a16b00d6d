"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]  # step (0 is the first) -> factor on the base learning rate


def warmup(step: int, steps: int) -> float:
    """Linear from 1/steps at step 0 to 1."""
    return min(1.0, (step + 1) / steps) if steps else 1.0


def cosine(total: int, warmup_steps: int, final: float) -> Schedule:
    """Warm-up, then a half cosine down to `final` at the last step (Loshchilov and Hutter 2017)."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return warmup(step, warmup_steps)
        done = min(1.0, (step - warmup_steps) / max(1, total - 1 - warmup_steps))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def warmup_stable_decay(total: int, warmup_steps: int, decay_steps: int, final: float) -> Schedule:
    """Warm-up, a plateau, then linear down to `final` over the last `decay_steps` steps (Hu et al. 2024)."""

    def factor(step: int) -> float:
        left = total - 1 - step
        if decay_steps and left < decay_steps:
            return min(warmup(step, warmup_steps), final + (1 - final) * max(0, left) / decay_steps)
        return warmup(step, warmup_steps)

    return factor


def constant(warmup_steps: int) -> Schedule:
    return lambda step: warmup(step, warmup_steps)


def make(kind: str, total: int, warmup_steps: int, decay_steps: int, final: float) -> Schedule:
    """A schedule by name: cosine, wsd or constant."""
    if kind == "cosine":
        return cosine(total, warmup_steps, final)
    if kind == "wsd":
        return warmup_stable_decay(total, warmup_steps, decay_steps, final)
    if kind == "constant":
        return constant(warmup_steps)
    raise ValueError(f"no schedule called {kind}")
