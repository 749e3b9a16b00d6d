"""The loss over a vocabulary that is cut, whole or stored in shards, of any size.

Sources: NVIDIA/Megatron-LM#7452, NVIDIA/Megatron-LM#737, NVIDIA/Megatron-LM#1754, pytorch/pytorch#150490,
vllm-project/vllm#31474.
"""

from __future__ import annotations

import math

import pytest
import torch
from case_models import tiny
from case_runs import (
    Run,
    agreed,
    assert_equals_one_device,
    assert_gradients,
    batch_of,
    one_device,
    refused,
    step_of,
    values_of,
)

import dtensor_lm as dl
from dtensor_lm import Mesh, Plan, PlanError
from dtensor_lm.sharding_plans import tp, tp_sp
from dtensor_lm.testing.equivalence import gathered

HEADS = dict.fromkeys(("heads", "core_heads", "ffn"), "tp")  # kv heads stay whole, so that 4 ranks do for 2 of them
# The head cut over the vocabulary, stored in shards (of the embedding, of the vocabulary), and on every rank.
HEAD = {
    "cut": Plan({**HEADS, "vocab": "tp"}),
    "cut, sequence parallel": Plan({**HEADS, "vocab": "tp", "res": "tp"}),
    "stored by embed": Plan(storage={"embed": "tp"}),
    "stored by vocab": Plan(HEADS, storage={"vocab": "tp"}),
    "whole": Plan(HEADS),
    "whole, sequence parallel": Plan({**HEADS, "res": "tp"}),
}
OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}]


@pytest.mark.case("LOSS-06")
@pytest.mark.parametrize("head", HEAD)
@pytest.mark.parametrize(("ranks", "options"), [(2, {}), (4, OPTIONS[1])])
def test_every_layout_of_the_head_has_the_same_loss(ranks: int, head: str, options: dict[str, float]) -> None:
    run = Run(Mesh(tp=ranks), HEAD[head], changes=options)
    values, batch = values_of(run), batch_of([8, 5])
    loss, gradients, norm = one_device(run, values).gradients(batch)
    assert_gradients(agreed(run, batch, values), loss, gradients, norm)


@pytest.mark.case("LOSS-06")
@pytest.mark.quick
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothed"])
def test_smoothing_and_z_loss_count(options: dict[str, float]) -> None:
    """The reference of the test above is textbook code, and its options change the loss."""
    run = Run(Mesh(), changes=options)
    values, batch = values_of(run), batch_of([8, 5])
    loss, _, _ = one_device(run, values).gradients(batch)
    model = one_device(run, values).model
    x, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    cross_entropy = torch.nn.functional.cross_entropy
    expected = cross_entropy(x, labels, label_smoothing=options.get("label_smoothing", 0.0))
    expected += options.get("z_loss", 0.0) * x.logsumexp(-1).square()[labels >= 0].mean()
    assert loss == pytest.approx(expected.item(), rel=1e-13)
    assert not options or abs(loss - cross_entropy(x, labels).item()) > 0.01


@pytest.mark.case("LOSS-06")
@pytest.mark.parametrize("head", HEAD)
def test_uniform_logits_cost_ln_32(head: str) -> None:
    """Not ln 32 + ln tp, nor ln(32 / tp): logits are either cut or whole, and the loss knows which."""
    run = Run(Mesh(tp=4), HEAD[head])
    values = values_of(run)
    values["head.loss.weight"].zero_()
    assert agreed(run, batch_of([8, 5]), values).loss == pytest.approx(math.log(32), rel=1e-15)


@pytest.mark.quick
@pytest.mark.case("LOSS-06")
def test_what_the_loss_cannot_do_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match=r"needs embed whole, but the plan cuts it by axis tp: embed -> \(\)"):
        Run(Mesh(tp=2), Plan({"embed": "tp"})).program()
    with pytest.raises(dl.UserError, match=r"it has no logit_softcap; it has vocab, .*label_smoothing, z_loss"):
        tiny(logit_softcap=30.0)
    for command in ("plan", "check", "train"):
        said = refused([command, "--label-smooth", "0.1", "--z-loss", "-1"], capsys, monkeypatch)
        assert "  - --label-smooth: unknown option (did you mean --label-smoothing?)\n" in said
        assert "  - z_loss is -1.0: must be 0 or more\n" in said


# Sizes that the ranks do not divide (Megatron-LM#1754)


@pytest.mark.case("TP-06")
@pytest.mark.quick
@pytest.mark.parametrize(
    ("vocab", "ranks", "works"), [(30, 4, "28 or 32"), (33, 2, "32 or 34"), (33, 4, "32 or 36"), (3, 4, "4")]
)
def test_a_vocabulary_that_cannot_be_cut_is_refused_at_once(vocab: int, ranks: int, works: str) -> None:
    with pytest.raises(PlanError, match=rf"vocab: {vocab} does not divide over tp={ranks}: use vocab of {works}"):
        Run(Mesh(tp=ranks), tp(), changes={"vocab": vocab, "kv_heads": 4}).program()


STORED = {
    "embed": Plan({"batch": "dp"}, storage={"embed": "dp"}),
    "vocab": Plan({"batch": "dp"}, storage={"vocab": "dp"}),
}


def exported(run: Run, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters after a step."""
    step = step_of(run, dl.adamw(lr=0.1, weight_decay=0.1))
    state, _ = step(step.load(values), [{n: x[:1] for n, x in batch_of([8], vocab=run.changes["vocab"]).items()}])
    return gathered(state.parameters)


@pytest.mark.case("TP-06", "UX-04")
@pytest.mark.parametrize(
    ("storage", "vocab", "ranks", "tied"),
    [
        ("embed", 30, 4, False),
        ("embed", 33, 2, True),
        ("embed", 3, 4, True),
        ("vocab", 30, 4, True),
        ("vocab", 33, 2, False),
        ("vocab", 33, 4, True),
        ("vocab", 3, 4, False),
        ("vocab", 3, 4, True),
    ],
)
def test_shards_of_any_vocabulary(storage: str, vocab: int, ranks: int, tied: bool) -> None:
    """30, 33 and 3 rows in 4 shards, of which the last holds fewer or none: no padding takes part in anything."""
    run = Run(Mesh(dp=ranks), STORED[storage], changes={"vocab": vocab, "tied": tied}, batch=ranks)
    batch = batch_of([8, 5, 0, 1][:ranks], vocab=vocab)
    assert_equals_one_device(run, [batch] * 2, values_of(run))
    values = values_of(run)
    values["embed.weight" if tied else "head.loss.weight"].zero_()
    assert agreed(run, batch, values).loss == pytest.approx(math.log(vocab), rel=1e-15)
    shapes = {n: tuple(p.shape) for n, p in tiny(**run.changes).named_parameters()}
    assert {n: tuple(x.shape) for n, x in run.everywhere(exported, values)[0].items()} == shapes


@pytest.mark.case("TP-06")
@pytest.mark.parametrize("plan", [tp(), tp_sp()], ids=["tp", "tp_sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_30_rows_on_2_ranks(tied: bool, plan: Plan) -> None:
    run = Run(Mesh(tp=2), plan, changes={"vocab": 30, "tied": tied})
    values, batch = values_of(run), batch_of([8, 5], vocab=30)
    assert_equals_one_device(run, [batch] * 2, values)
    values["embed.weight" if tied else "head.loss.weight"].zero_()
    assert agreed(run, batch, values).loss == pytest.approx(math.log(30), rel=1e-15)
