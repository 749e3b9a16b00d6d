"""An inf or NaN that one rank meets is seen by all of them in the same step, changes nothing, and ends the run.

Sources: pytorch/pytorch#46849, facebookresearch/habitat-lab#2226, kyutai-labs/pocket-tts#262,
deepspeedai/DeepSpeed#7171.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from case_runs import Run, batch_of, step_of, values_of
from torch import Tensor

import dtensor_lm as dl
from dtensor_lm import Mesh
from dtensor_lm.config import EvaluationConfig, OptimizerConfig, SampleConfig, TrainConfig
from dtensor_lm.sharding_plans import standard
from dtensor_lm.state import TrainState, local
from dtensor_lm.testing.equivalence import parts
from dtensor_lm.testing.workers import pool
from dtensor_lm.training import loop
from dtensor_lm.training.step import Batch, Metrics, TrainStep

RANK = 2  # the only one that meets it
PLACES = [
    "gradient of layers.0.mlp.up.weight",
    "gradient of head.norm.weight",
    "parameter layers.1.mlp.gate.weight",
]


def spoiling(place: str, value: float, when: int) -> Any:
    """Within it, one entry of a gradient or parameter becomes `value` on one rank at its step `when`."""
    what, _, name = place.rpartition(" ")
    gradients, steps = TrainStep.gradients, iter(range(1, 100))

    def spoil(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[0] = value
        return x

    def spoiled(self: TrainStep, state: TrainState, batch: Batch) -> Any:
        if next(steps) != when or dist.get_rank() != RANK:
            return gradients(self, state, batch)
        if what == "parameter":
            local(state.parameters[name]).view(-1)[0] = value
            return gradients(self, state, batch)
        forward = self.runner.module.forward

        def hooked(leaves: dict[str, Tensor], *more: Any, **inputs: Tensor) -> Tensor:
            leaves[name].register_hook(spoil)
            return forward(leaves, *more, **inputs)

        with mock.patch.object(self.runner.module, "forward", hooked):
            return gradients(self, state, batch)

    return mock.patch.object(TrainStep, "gradients", spoiled)


def copies(state: TrainState) -> list[Tensor]:
    """Parameters and moments on this rank."""
    return [local(x).clone() for tree in (state.parameters, *state.optimizer.values()) for x in tree.values()]


def metrics_of_3_steps(run: Run, place: str) -> dict[tuple[float, float], list[Metrics]]:
    """Per step, by the value that is met in the third and by the norm to clip to (0: no clipping)."""
    step, found = step_of(run, dl.adamw(lr=1e-3)), {}
    for value, clip_norm in ((math.inf, 0.0), (-math.inf, 1.0), (math.nan, 1.0)):
        step.clip_norm = clip_norm
        state, steps = step.load(values_of(run)), found.setdefault((value, clip_norm), [])
        with spoiling(place, value, 3):
            for i in range(3):
                before = copies(state)
                state, metrics = step(state, parts(step.program, batch_of([8, 5], seed=i), step.device))
                steps.append(metrics)
        if place.startswith("gradient"):
            assert all(torch.equal(x, y) for x, y in zip(before, copies(state), strict=True))
    return found


@pytest.mark.case("NUM-01")
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("place", PLACES)
def test_every_rank_sees_it(place: str, zero: int) -> None:
    """By name. And parameters and moments stay, bit for bit, as they were before the step."""
    ranks = Run(Mesh(dp=2, tp=2), standard(zero), dtype="float32").everywhere(metrics_of_3_steps, place)
    assert len({str(found) for found in ranks}) == 1
    for *before, last in ranks[0].values():
        assert all(math.isfinite(x) for metrics in before for x in (metrics.loss, metrics.grad_norm))
        assert not any(metrics.not_finite for metrics in before)
        assert not math.isfinite(last.grad_norm)
        assert math.isfinite(last.loss) == place.startswith("gradient")
        assert last.not_finite == (place.removeprefix("parameter "),)


def run_that_is_spoiled(config: TrainConfig, place: str, value: float) -> tuple[int, str]:
    """Exit code and messages."""
    text = io.StringIO()
    with spoiling(place, value, 3), contextlib.redirect_stderr(text), contextlib.redirect_stdout(io.StringIO()):
        return loop.run(config), text.getvalue()


@pytest.mark.case("NUM-01")
@pytest.mark.parametrize(("clip_norm", "value"), [(0.0, math.inf), (1.0, math.inf), (1.0, math.nan)])
def test_the_run_ends(clip_norm: float, value: float, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n" for i in range(2000)))
    config = TrainConfig(
        layers=1, mesh="dp=2,tp=2", batch=2, seq=8, steps=6, data=str(tmp_path / "text.txt"),
        run_dir=str(tmp_path / "run"), device="cpu", evaluation=EvaluationConfig(every=0),
        sample=SampleConfig(tokens=0), optimizer=OptimizerConfig(clip_norm=clip_norm), progress=False,
    )  # fmt: skip
    ranks = pool(4).run(run_that_is_spoiled, config, PLACES[0], value)
    assert [code for code, _ in ranks] == [1] * 4
    assert "error: step 3: loss " in ranks[0][1]
    assert f": not finite (in {PLACES[0]}); a smaller --optimizer.lr may help" in ranks[0][1]
    assert [said for _, said in ranks[1:]] == [""] * 3
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [math.isfinite(record["grad_norm"]) for record in records] == [True, True, False]
