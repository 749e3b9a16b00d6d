"""What Python callers can get wrong: one clear error, never a silent wrong number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests_models import MLP, Loss, Small, Table
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm.errors import ModelError
from dtensor_lm.sharding_plans import Plan
from dtensor_lm.testing.equivalence import Report, compare, parts, random_batch
from dtensor_lm.testing.workers import pool

pytestmark = pytest.mark.quick


def tiny(**more: Any) -> nn.Module:
    return dl.models.build("tiny", layers=1, embed=16, heads=2, kv_heads=2, ffn=16, **more)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: dl.adamw(lr=math.nan), "lr is nan: a number of at least 0"),
        (lambda: dl.adamw(lr=-1, betas=(2, 0.9)), "beta1 is 2: a number of at least 0 and below 1"),
        (lambda: dl.sgd(lr="1"), "lr is '1'"),  # type: ignore[arg-type]
        (lambda: dl.plans.standard(zero=4), "zero is 4: use 0, 1, 2 or 3"),
        (lambda: dl.resolve(tiny().half(), Plan(), dl.Mesh()), "parameters are float16"),
        (lambda: dl.resolve(mixed(), Plan(), dl.Mesh()), "parameters have several dtypes (bfloat16, float32)"),
    ],
)
def test_arguments(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(dl.UserError) as error:
        make()
    assert message in str(error.value)


def mixed() -> nn.Module:
    model = tiny().bfloat16()
    model.head.norm.float()
    return model


def refused() -> list[str]:
    program = dl.resolve(tiny(), dl.plans.standard(), dl.Mesh(), batch=2, seq=8)
    step = dl.train_step(program, dl.adamw(), device="cpu")
    state = step.init()
    whole = {n: torch.zeros(p.storage.shape) for n, p in program.parameters.items()}
    (inputs,) = parts(program, random_batch(program, 0), step.device)
    tokens, labels = inputs["tokens"], inputs["labels"]
    plain = dl.train_step(program, dl.sgd(), device="cpu")
    said = []
    for act in (
        lambda: dl.train_step(program, dl.sgd(), clip_norm=-1.0, device="cpu"),
        lambda: dl.train_step(program, torch.optim.AdamW, device="cpu"),
        lambda: step.load({**whole, "embed.weight": torch.zeros(300, 20), "more": torch.zeros(1)}),
        lambda: step.load({n: x for n, x in whole.items() if n != "embed.weight"}),
        lambda: step.init(0.0),
        lambda: step(state, inputs),
        lambda: step(state, [{"tokens": tokens.to("meta"), "labels": labels}]),
        lambda: step(state, [{"tokens": tokens.int(), "labels": labels}]),
        lambda: step(state, [{"tokens": tokens}]),
        lambda: plain(state, [inputs]),
        lambda: step.evaluate(state, []),
    ):
        try:
            act()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    step(state, [inputs])  # none of them took the state
    return said


def test_what_a_step_refuses() -> None:
    said = pool(1).run(refused)[0]
    for text, message in zip(
        said,
        (
            "clip_norm is -1.0: a number of at least 0, where 0 does not clip",
            "make it with dtensor_lm.adamw(...)",
            "embed.weight: has shape [300, 20], the model [256, 16]",
            "embed.weight: missing",
            "seed is 0.0: a whole number",
            "a batch is a list with one mapping of inputs per micro-batch",
            "tokens is torch.int64 on meta: an int64 tensor on cpu is expected",
            "tokens is torch.int32 on cpu",
            "the model's inputs are tokens, labels, not tokens",
            "this state has ['exp_avg', 'exp_avg_sq']; the optimizer has []",
            "nothing to evaluate",
        ),
        strict=True,
    ):
        assert message in text, (message, text)
    assert "more: the model has no such parameter" in said[2]


class Dropped(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


def test_random_operators_are_refused() -> None:
    def build() -> nn.Module:
        model = Small()
        model.mlp = Dropped(8, 16)
        return model.eval()  # a step trains, whatever mode the model is in

    with pytest.raises(dl.ModelError, match=r"mlp: aten.* is random, and would differ between ranks"):
        dl.resolve(dl.abstract(build), Plan(), dl.Mesh(), batch=2, seq=6)


def test_a_model_is_traced_in_training_mode() -> None:
    def bytes_of(model: nn.Module) -> list[int]:
        program = dl.resolve(model, dl.plans.standard(), dl.Mesh(tp=2), batch=2, seq=8)
        return [c.bytes for c in program.collectives if "sum over vocab" in c.where]

    model = tiny(label_smoothing=0.1)
    assert bytes_of(model.eval()) == bytes_of(tiny(label_smoothing=0.1)) == [3 * 2 * 8 * 4]
    assert not model.training  # and it is left as it was


class OwnsBoth(nn.Module):
    """The root has parameters of its own, used before and after its units, and one that nothing uses."""

    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq",
        params={"before": "embed", "after": "embed", "unused": "embed"},
        cuts="batch seq res seq+res",
    )

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp, self.loss = Table(12, 8), MLP(8, 16), Loss()
        self.before, self.after, self.unused = (nn.Parameter(torch.randn(8)) for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.mlp(self.table(tokens) * self.before) * self.after, labels)


def owns_both() -> Report:
    plan = Plan({"batch": "fsdp"}, {"embed": "fsdp"})
    program = dl.resolve(dl.abstract(OwnsBoth), plan, dl.Mesh(fsdp=2), batch=4, seq=6, micro_batches=2, dtype="float64")
    return compare(program, steps=2)


def test_parameters_of_the_model_itself_are_gathered_again_once() -> None:
    for report in pool(2).run(owns_both):
        assert report.ok, report


def test_a_plan_or_mesh_of_another_kind() -> None:
    with pytest.raises(ModelError) as error:
        dl.resolve(tiny(), "standard", "tp=2")
    assert list(error.value.faults) == [
        "'standard' is no Plan: give one, such as dtensor_lm.plans.standard()",
        "'tp=2' is no Mesh: give one, such as dtensor_lm.Mesh(fsdp=2, tp=2)",
    ]
