"""The training step as a function: donation, batches that do not fit, models that cannot be trained, odd outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests_models import Small, Table
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm.sharding_plans import Plan
from dtensor_lm.state import DonatedStateError, local
from dtensor_lm.testing.equivalence import Report, compare, parts, random_batch
from dtensor_lm.testing.local import assert_equivalent
from dtensor_lm.testing.workers import pool
from dtensor_lm.training.step import TrainStep

pytestmark = pytest.mark.quick


def small(mesh: str, plan: Plan) -> Report:
    program = dl.resolve(
        dl.abstract(Small), plan, dl.Mesh.parse(mesh), batch=4, seq=6, micro_batches=2, dtype="float64"
    )
    assert program.output.state("tp") == ("R" if "res" in plan.compute else "I")
    return compare(program, steps=2)


TP = {"ffn": "tp", "vocab": "tp", "batch": "dp"}


@pytest.mark.parametrize("compute", [TP, {**TP, "res": "tp"}, {"batch": "dp", "res": "tp"}])
def test_a_loss_in_state_r_starts_backward_once(compute: dict[str, Any]) -> None:
    for report in pool(2).run(small, "tp=2", Plan(compute)):
        assert report.ok, report
    for report in pool(4).run(small, "dp=2,tp=2", Plan(compute, {"embed": "dp"})):
        assert report.ok, report


class Means(Small):
    """Returns a mean where the signature says a sum."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return super().forward(tokens, labels) / tokens.numel()


def build_small() -> nn.Module:
    return dl.abstract(Small)


def build_means() -> nn.Module:
    return dl.abstract(Means)


def test_assert_equivalent() -> None:
    plan, sizes = Plan(TP, {"embed": "dp"}), {"batch": 4, "seq": 6}
    assert assert_equivalent(build_small, plan, dl.Mesh(tp=2), **sizes).ok
    assert assert_equivalent(build_small(), plan, dl.Mesh(dp=2), steps=0, **sizes).ok
    with pytest.raises(AssertionError, match=r"Means on mesh dp=2 differs from one device"):
        assert_equivalent(build_means, plan, dl.Mesh(dp=2), **sizes)


def steps(**more: Any) -> tuple[TrainStep, dl.TrainState, list[dict[str, Tensor]]]:
    model = dl.models.build("tiny", layers=1, embed=16, heads=2, kv_heads=2, ffn=16)
    program = dl.resolve(model, dl.plans.standard(), dl.Mesh(), batch=2, seq=8, micro_batches=2)
    step = dl.train_step(program, dl.adamw(), device="cpu", **more)
    return step, step.init(), parts(program, random_batch(program, 0), step.device)


def donated() -> list[str]:
    step, state, batch = steps()
    after, _ = step(state, batch)
    assert after.step == 1
    said = []
    for use in (lambda: step(state, batch), lambda: state.parameters, lambda: state.step):
        try:
            use()
        except DonatedStateError as error:
            said.append(str(error))
    return said


def test_a_donated_state_cannot_be_used() -> None:
    said = pool(1).run(donated)[0]
    assert said == ["this state was donated to a step: use the state that the step returned"] * 3


def misfits() -> list[str]:
    step, state, batch = steps()
    wrong = [{n: x[:, :4] for n, x in b.items()} for b in batch]
    outside = [{"tokens": b["tokens"] + 300, "labels": b["labels"]} for b in batch]
    said = []
    for bad in (batch[:1], wrong, outside):
        try:
            step(state, bad)
        except (ValueError, IndexError) as error:
            said.append(str(error))
    step(state, batch)  # the state was not donated by any of them
    return said


def test_batches_that_do_not_fit() -> None:
    said = pool(1).run(misfits)[0]
    assert said[0] == "1 micro-batches, but the Program was made for 2"
    assert said[1] == "tokens has shape [1, 4]; this Program gives this rank [1, 8] of i64[batch=1, seq=8]"
    assert "outside the vocabulary of 256" in said[2]


def not_finite() -> tuple[bool, bool]:
    step, state, batch = steps()
    local(state.parameters["head.norm.weight"])[0] = torch.inf
    before = {n: local(p).clone() for n, p in state.parameters.items()}
    state, metrics = step(state, batch)
    same = all(torch.equal(local(p), before[n]) for n, p in state.parameters.items())
    moments = all(not local(m).any() for m in state.optimizer["exp_avg"].values())
    return metrics.loss != metrics.loss or abs(metrics.loss) == torch.inf, same and moments


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    assert pool(1).run(not_finite) == [(True, True)]


class Logits(nn.Module):
    region = dl.Region(inputs={"tokens": "int batch seq"}, outputs="batch seq embed", cuts="batch seq")

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(12, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def no_loss() -> str:
    program = dl.resolve(dl.abstract(Logits), Plan(), dl.Mesh(), batch=2, seq=6)
    with pytest.raises(dl.ModelError) as error:
        dl.train_step(program, dl.sgd(), device="cpu")
    return str(error.value)


def test_a_model_without_a_loss_cannot_be_trained() -> None:
    text = "a model that is trained takes 'labels' and returns its loss, a scalar sum over tokens"
    assert pool(1).run(no_loss) == [text]


class Peeks(Small):
    """Uses another region's parameter without naming it."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.loss(x * self.mlp.down.bias, labels)


def test_a_parameter_that_a_region_does_not_name_is_not_seen() -> None:
    with pytest.raises(dl.ModelError, match="a region sees only parameters that stand in its params"):
        dl.resolve(dl.abstract(Peeks), Plan(), dl.Mesh(), batch=2, seq=6)
