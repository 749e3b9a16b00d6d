"""Every mesh computes what one device computes: loss, every gradient, the norm, parameters after SGD and AdamW steps,
collectives and bytes. Every pair of settings meets at least once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest

import dtensor_lm as dl
from dtensor_lm import edges
from dtensor_lm.gathering import GatherGroup
from dtensor_lm.ops.cross_entropy import IGNORE
from dtensor_lm.partition import _UnitCall
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.testing.equivalence import Report, compare, random_batch
from dtensor_lm.testing.workers import pool
from dtensor_lm.training.step import TrainStep

# mesh, zero, sequence parallel, micro-batches, tied
RUNS: list[tuple[str, int, bool, int, bool]] = [
    ("", 0, True, 2, False),
    ("dp=2", 0, True, 1, False),
    ("dp=2", 1, False, 2, True),
    ("dp=2", 2, True, 2, False),
    ("dp=2", 3, False, 1, True),
    ("fsdp=4", 0, False, 1, True),
    ("fsdp=4", 0, True, 2, False),
    ("tp=4", 0, True, 1, True),
    ("tp=4", 0, False, 2, False),
    ("dp=2,tp=2", 0, False, 2, True),
    ("dp=2,tp=2", 1, True, 1, False),
    ("dp=2,tp=2", 2, False, 1, False),
    ("dp=2,tp=2", 3, True, 2, True),
    ("fsdp=2,tp=2", 0, True, 2, True),
    ("fsdp=2,tp=2", 0, False, 1, False),
    ("tp=2,fsdp=2,dp=2", 1, True, 2, True),
    ("dp=2,fsdp=2,tp=2", 0, True, 1, False),
    ("dp=2,fsdp=2,tp=2", 2, True, 2, True),
    ("dp=2,fsdp=2,tp=2", 3, False, 1, False),
    ("dp=2,fsdp=2", 1, True, 2, False),
    ("fsdp=2,dp=2", 2, False, 1, True),
    ("dp=2,fsdp=2", 3, True, 1, True),
]
QUICK = {RUNS[13]}


def program(mesh: str, zero: int, sp: bool, micro: int, tied: bool, dtype: str = "float64", **model: Any) -> Program:
    """Small, and a batch of 8: with 4 ranks and 2 micro-batches each has one sequence, some without a label."""
    built = dl.models.build("tiny", layers=2, tied=tied, vocab=64, embed=32, ffn=64, **model)
    plan = dl.plans.standard(zero=zero, sequence_parallel=sp)
    return dl.resolve(built, plan, dl.Mesh.parse(mesh), batch=8, seq=16, micro_batches=micro, dtype=dtype)


def run(*settings: Any, steps: int = 2, **more: Any) -> Report:
    return compare(program(*settings, **more), steps=steps)


def test_every_pair_of_settings_meets() -> None:
    met = {(i, r[i], j, r[j]) for r in RUNS for i, j in combinations(range(1, 5), 2)}
    values = {1: (0, 1, 2, 3), 2: (True, False), 3: (1, 2), 4: (True, False)}
    for i, j in combinations(range(1, 5), 2):
        for a in values[i]:
            for b in values[j]:
                assert (i, a, j, b) in met, f"{a} and {b} never meet"
    for name in ("dp=2", "fsdp=4", "tp=4", "dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2,tp=2"):
        rows = [r for r in RUNS if dl.Mesh.parse(r[0]).sizes == dl.Mesh.parse(name).sizes or r[0] == name]
        for i in (2, 3, 4):
            assert {r[i] for r in rows} == set(values[i]), (name, i)


@pytest.mark.parametrize(
    "settings", [pytest.param(r, marks=pytest.mark.quick if r in QUICK else (), id="-".join(map(str, r))) for r in RUNS]
)
def test_equal_to_one_device(settings: tuple[str, int, bool, int, bool]) -> None:
    for report in pool(dl.Mesh.parse(settings[0]).size).run(run, *settings, timeout=110):
        assert report.ok, report


def test_label_smoothing_and_z_loss() -> None:
    for report in pool(4).run(run, "fsdp=2,tp=2", 0, True, 1, False, label_smoothing=0.1, z_loss=1e-3):
        assert report.ok, report


# Planted faults: each must be seen.


@contextmanager
def planted(fault: str) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    try:
        if fault.startswith("edge "):
            _, change, forward, backward = fault.split()
            before, after = change.split(">")
            patch.setitem(edges.TABLE, (before, after), (forward, backward))
        elif fault == "no reduction of gradients":
            original = TrainStep.__init__

            def init(self: TrainStep, *args: Any) -> None:
                original(self, *args)
                self.reduce = []

            patch.setattr(TrainStep, "__init__", init)
        elif fault == "copies counted in the norm":
            from dtensor_lm.layout import Layout

            patch.setattr(Layout, "copies", property(lambda self: 1))
        elif fault == "a scaled gradient":
            scatter = GatherGroup.scatter
            patch.setattr(GatherGroup, "scatter", lambda self, grads: [2 * g for g in scatter(self, grads)])
        elif fault == "a dropped layer":
            from dtensor_lm.models.llama import Block

            forward_ = _UnitCall.__call__

            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                return args[0] if isinstance(self.call.run.__self__, Block) else forward_(self, *args, **kwargs)

            patch.setattr(_UnitCall, "__call__", call)
        else:
            raise ValueError(fault)
        yield
    finally:
        patch.undo()


def run_with(fault: str, settings: tuple[Any, ...]) -> Report:
    with planted(fault):
        return run(*settings, steps=0)  # gradients, loss and norm of one step tell


TP = ("fsdp=2,tp=2", 0, True, 1, False)


@pytest.mark.parametrize(
    "fault, settings, seen",
    [
        ("edge S>R all_gather slice", TP, "max_grad_error"),
        ("edge P>S slice all_gather", TP, "loss_error"),
        ("edge P>I all_reduce all_reduce", ("fsdp=2,tp=2", 0, False, 1, False), "max_grad_error"),
        ("edge I>R nothing nothing", ("fsdp=2,tp=2", 0, False, 1, False), "max_grad_error"),
        ("no reduction of gradients", ("dp=2", 0, True, 1, False), "max_grad_error"),
        ("copies counted in the norm", TP, "grad_norm_error"),
        ("a scaled gradient", TP, "max_grad_error"),
        ("a dropped layer", TP, "loss_error"),
    ],
)
def test_planted_faults_are_seen(fault: str, settings: tuple[Any, ...], seen: str) -> None:
    report = pool(dl.Mesh.parse(settings[0]).size).run(run_with, fault, settings)[0]
    assert not report.ok
    assert not getattr(report, seen) <= 1e-6, report


def test_a_collective_that_the_program_does_not_list_is_seen() -> None:
    report = pool(4).run(run_with, "edge I>R nothing nothing", ("fsdp=2,tp=2", 0, False, 1, False))[0]
    # The Program is derived with the planted table too, so prediction and run agree: equality is what tells.
    assert report.collectives_match and not report.ok
    assert not pool(2).run(run_with, "no reduction of gradients", ("dp=2", 0, True, 1, False))[0].collectives_match


@pytest.mark.quick
@pytest.mark.parametrize(
    "difference",
    [
        *({name: error} for name in ("loss_error", "max_grad_error", "grad_norm_error", "max_param_error")
          for error in (2e-10, math.inf, math.nan)),
        *({"max_param_error_adamw": error} for error in (2e-10, math.nan)),
        *({name: False} for name in ("initial_values_equal", "replicas_equal", "collectives_match")),
    ],
    ids=str,
)  # fmt: skip
def test_every_difference_alone_is_seen(difference: dict[str, Any]) -> None:
    assert Report().ok
    assert not Report(**difference).ok


@pytest.mark.quick
def test_batches_have_a_rank_without_labels() -> None:
    """So that a mean over ranks, or over micro-batches, is another number than the mean over tokens."""
    small = dl.resolve(dl.models.build("tiny", layers=1), dl.plans.standard(), dl.Mesh(dp=4), batch=4, seq=16)
    for seed in range(3):
        real = (random_batch(small, seed)["labels"] != IGNORE).sum(1).tolist()
        assert real[0] == 0 and len({*real}) > 2 and 0 < sum(real) < 4 * 16
