"""Optimizers on the layout that the plan gives them: torch's own fused implementations on local shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from dtensor_lm.errors import ConfigError


@dataclass(frozen=True)
class Group:
    """Parameters that share a weight decay: local shards in the optimizer's layout, with their gradients and slots."""

    decay: bool
    masters: list[Tensor]
    grads: list[Tensor]
    slots: dict[str, list[Tensor]]


class Optimizer(Protocol):
    """What a training step needs of an optimizer: its slots, and an update in place."""

    @property
    def lr(self) -> float: ...

    @property
    def slots(self) -> tuple[str, ...]: ...

    def update(self, group: Group, step: int, lr: float) -> None:
        """step: counted from 1."""
        ...


def _check(optimizer: object, **values: float) -> None:
    """Raises ConfigError for what no optimizer can use, all at once."""
    faults = []
    for name, value in values.items():
        below = 1.0 if name in ("beta1", "beta2", "momentum") else math.inf
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < below:
            faults.append(f"{name} is {value!r}: a number of at least 0" + (" and below 1" if below == 1.0 else ""))
    if faults:
        raise ConfigError(f"{type(optimizer).__name__} cannot use these values:", faults)


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019). Decay only touches groups that decay."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay, beta1=self.betas[0], beta2=self.betas[1])

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(self, group: Group, step: int, lr: float) -> None:
        if not group.masters:
            return
        n, device = len(group.masters), group.masters[0].device
        count = [*torch.full((n,), step - 1.0, device=device).unbind()]  # torch adds the 1 of this step
        torch_adamw(
            group.masters, group.grads, group.slots["exp_avg"], group.slots["exp_avg_sq"], [], count,
            fused=True, amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=lr,
            weight_decay=self.weight_decay if group.decay else 0.0, eps=self.eps, maximize=False,
        )  # fmt: skip


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with momentum if asked for."""

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(self, group: Group, step: int, lr: float) -> None:
        if not group.masters:
            return
        # torch starts its buffer with the first gradient; from zeros the first step gives the same.
        buffers: list[Tensor | None] = [*group.slots["momentum"]] if self.momentum else [None] * len(group.masters)
        torch_sgd(
            group.masters, group.grads, buffers, foreach=True,
            weight_decay=self.weight_decay if group.decay else 0.0, momentum=self.momentum, lr=lr,
            dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip


def adamw(
    lr: float = 3e-4,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> AdamW:
    return AdamW(lr, betas, eps, weight_decay)


def sgd(lr: float = 1e-2, momentum: float = 0.0, weight_decay: float = 0.0) -> SGD:
    return SGD(lr, momentum, weight_decay)
