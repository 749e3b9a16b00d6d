"""What the cases share: a run as data, a batch with labels where a case wants them, and one device to compare with."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from case_models import is_matrix, tiny
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm import launch
from dtensor_lm.cli import main
from dtensor_lm.ops.cross_entropy import IGNORE
from dtensor_lm.state import wrap
from dtensor_lm.testing.equivalence import Reference, Report, compare, gathered, parts, worst
from dtensor_lm.testing.workers import pool

Whole = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """A model under a plan on a mesh; the same on every worker."""

    mesh: dl.Mesh
    plan: dl.Plan = field(default_factory=dl.plans.standard)
    model: Callable[..., nn.Module] = tiny
    changes: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 2
    seq: int = 8
    micro_batches: int = 1
    dtype: str = "float64"

    def program(self) -> dl.Program:
        return dl.resolve(
            self.model(**self.changes), self.plan, self.mesh,
            batch=self.batch, seq=self.seq, micro_batches=self.micro_batches, dtype=self.dtype,
        )  # fmt: skip

    def everywhere(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """`fn(self, *args)` on every rank."""
        return pool(self.mesh.size).run(fn, self, *args)


@dataclass(frozen=True)
class Found:
    """The first gradients of a run: means over tokens, whole."""

    loss: float
    norm: float
    tokens: int
    gradients: Whole


def batch_of(real: Sequence[int], seq: int = 8, vocab: int = 32, seed: int = 0) -> Whole:
    """Random tokens; row i has `real[i]` labels, then masked ones."""
    g = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(0, vocab, (len(real), seq), generator=g) for _ in range(2))
    for row, n in enumerate(real):
        labels[row, n:] = IGNORE
    return {"tokens": tokens, "labels": labels}


def values_of(run: Run, seed: int = 1) -> Whole:
    """Parameters far from their initial values, so that tokens have losses of different sizes."""
    g = torch.Generator().manual_seed(seed)
    shapes = {n: p.shape for n, p in run.model(**run.changes).named_parameters()}
    return {
        n: 0.5 * torch.randn(s, generator=g, dtype=torch.float64) + (0.0 if is_matrix(n) else 1.0)
        for n, s in shapes.items()
    }


def one_device(run: Run, values: Whole) -> Reference:
    """Plain PyTorch."""
    return Reference(run.program(), values)


def step_of(run: Run, optimizer: Any = None, clip_norm: float = 0.0) -> Any:
    return dl.train_step(run.program(), optimizer or dl.sgd(lr=0.1), clip_norm=clip_norm, device="cpu")


def first_gradients(run: Run, batch: Whole, values: Whole) -> Found:
    """On a worker."""
    step = step_of(run)
    grads, loss, tokens, norm = step.gradients(step.load(values), parts(step.program, batch, step.device))
    whole = gathered({n: wrap(g / tokens, step.program.parameters[n].optimizer) for n, g in grads.items()})
    return Found(loss, norm, tokens, whole)


def agreed(run: Run, batch: Whole, values: Whole) -> Found:
    """The first gradients, after a look whether every rank found the same."""
    first, *others = run.everywhere(first_gradients, batch, values)
    for other in others:
        assert (other.loss, other.norm, other.tokens) == (first.loss, first.norm, first.tokens)
        assert all(torch.equal(other.gradients[n], g) for n, g in first.gradients.items())
    return first


def compared(run: Run, batches: list[Whole] | None, values: Whole | None) -> Report:
    """On a worker."""
    return compare(run.program(), batches=batches, values=values, steps=len(batches) if batches else 3)


def assert_equals_one_device(run: Run, batches: list[Whole] | None = None, values: Whole | None = None) -> None:
    """Loss, every gradient, the norm, parameters after clipped SGD and AdamW steps, replicas, collectives."""
    report = run.everywhere(compared, batches, values)[0]
    assert report.ok, report.as_dict()


def assert_gradients(found: Found, loss: float, gradients: Whole, norm: float, tolerance: float = 1e-12) -> None:
    assert abs(found.loss - loss) <= tolerance * abs(loss)
    assert abs(found.norm - norm) <= tolerance * norm
    error, name = worst(found.gradients, gradients)
    assert error <= 100 * tolerance, f"{name}: {error}"


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of a command that ends with code 2 and before it starts a rank or a process group."""

    def started(*_: Any, **__: Any) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(launch, "launch", started)
    before = torch.distributed.is_initialized()
    assert main(argv) == 2
    assert torch.distributed.is_initialized() == before
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err
    return err
