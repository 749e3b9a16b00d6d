"""Norms under sequence parallelism, biases inside of sums, local computations, and fewer kv heads than ranks.

Sources: NVIDIA/Megatron-LM#1446, pytorch/torchtitan#2532, NVIDIA/TransformerEngine#435, pytorch/torchtitan#2106,
huggingface/text-generation-inference#1036, awslabs/slapo#10, pytorch/torchtitan#1805, pytorch/torchtitan#1878,
pytorch/pytorch#172932, huggingface/transformers#48307, bigcode-project/Megatron-LM#37.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from case_models import BiasedMLP, biased, chunked, numbered_model
from case_runs import (
    Run,
    Whole,
    agreed,
    assert_equals_one_device,
    assert_gradients,
    batch_of,
    one_device,
    step_of,
    values_of,
)
from expert_models import mixture

import dtensor_lm as dl
from dtensor_lm import Mesh, Plan, PlanError, commands
from dtensor_lm.config import CheckConfig
from dtensor_lm.sharding_plans import standard, tp, tp_sp
from dtensor_lm.state import local
from dtensor_lm.testing import check_regions, equivalence
from dtensor_lm.testing.assemble import different_copies
from dtensor_lm.testing.equivalence import parts, relative
from dtensor_lm.testing.workers import pool

PLANS = {"tp": tp(), "tp_sp": tp_sp()}


def test_the_models_of_these_cases_obey_the_law() -> None:
    for model in (biased(layers=1), mixture()):
        assert check_regions(model, ks=(2,)).ok


# Norm weights, whole on every rank, of which each rank sees a part of the sequence (Megatron-LM#1446)


def norms_after_20_steps(run: Run, values: Whole) -> tuple[list[str], list[str], float]:
    """Copies that differ: after 20 steps, after one was changed by hand; what a missing reduction would do."""
    step = step_of(run, dl.adamw(lr=1e-2), clip_norm=1.0)
    state = step.load(values)
    mine = parts(step.program, batch_of([8, 5]), step.device)
    reduced, *_ = step.gradients(state, mine)
    reduce, step.reduce = step.reduce, []
    partial, *_ = step.gradients(state, mine)
    step.reduce = reduce
    missing = min(relative(partial[n], reduced[n]) for n in reduced if "norm" in n)
    for i in range(20):
        state, _ = step(state, parts(step.program, batch_of([8, 5], seed=i), step.device))
    apart = different_copies(state, step.program)
    if torch.distributed.get_rank() == 1:
        local(state.parameters["head.norm.weight"])[3] += 1e-3
    return apart, different_copies(state, step.program), missing


@pytest.mark.case("TP-01")
def test_norms_under_sequence_parallelism() -> None:
    """Pre-norms, norms of q and k, and the final norm."""
    run = Run(Mesh(tp=4), tp_sp(), biased, dtype="float32")
    exact, batch, values = replace(run, dtype="float64"), batch_of([8, 5]), values_of(run)
    assert_gradients(agreed(exact, batch, values), *one_device(exact, values).gradients(batch))
    for apart, forced, missing in run.everywhere(norms_after_20_steps, values_of(run)):
        assert apart == []
        assert forced == ["head.norm.weight"]
        assert missing > 0.05


def check_with_a_copy_changed(config: CheckConfig) -> tuple[int, str]:
    """Exit code and output of `check` where rank 1 changes its copy of a norm after the steps."""
    train, text = equivalence._train, io.StringIO()

    def changed(*arguments: Any) -> Any:
        state = train(*arguments)
        if torch.distributed.get_rank() == 1:
            local(state.parameters["head.norm.weight"])[3] += 1e-13
        return state

    with mock.patch.object(equivalence, "_train", changed), contextlib.redirect_stdout(text):
        return commands.check(config), text.getvalue()


@pytest.mark.case("TP-01")
def test_check_reports_copies_that_differ() -> None:
    """Also where the difference is far below the tolerance of the comparison."""
    config = CheckConfig(mesh="tp=2", layers=1, seq=16, batch=2, steps=1)
    (code, text), (other, nothing) = pool(2).run(check_with_a_copy_changed, config)
    assert (code, other, nothing) == (1, 1, "")
    assert text.startswith("NOT equal to one device within 1e-10: tiny on mesh tp=2\n")
    assert "copies of head.norm.weight differ between ranks" in text


# A bias of 1.0 on a linear that is cut over its inputs (text-generation-inference#1036)


@pytest.mark.case("TP-02")
@pytest.mark.parametrize(("ranks", "plan"), [(2, "tp"), (2, "tp_sp"), (4, "tp_sp")])
def test_a_bias_inside_of_a_sum_counts_once(ranks: int, plan: str) -> None:
    run = Run(Mesh(tp=ranks), PLANS[plan], biased)
    values, batch = values_of(run), batch_of([8, 5])
    ending = [n for n in values if n.endswith(("wo_bias", "down_bias"))]
    assert len(ending) == 4
    for name in ending:
        values[name] = torch.ones_like(values[name])
    loss, gradients, norm = one_device(run, values).gradients(batch)
    assert_gradients(agreed(run, batch, values), loss, gradients, norm)
    assert_equals_one_device(run, [batch] * 2, values)
    counted_on_every_rank, _, _ = one_device(run, {n: x * ranks if n in ending else x for n, x in values.items()}
                                             ).gradients(batch)  # fmt: skip
    assert abs(counted_on_every_rank - loss) > 1e-3


@pytest.mark.case("TP-02")
@pytest.mark.parametrize("plan", [standard(3), standard(3, sequence_parallel=False)], ids=["sp", "no sp"])
def test_a_bias_inside_of_a_sum_with_shards(plan: Plan) -> None:
    run = Run(Mesh(dp=2, tp=2), plan, biased)
    assert_equals_one_device(run, [batch_of([8, 5])] * 2, values_of(run))


@pytest.mark.case("TP-02")
@pytest.mark.parametrize(
    ("ranks", "cut"),
    [(2, {"ffn": "tp"}), (4, {"ffn": "tp", "res": "tp"}), (2, {"expert": "tp"}), (4, {"expert": "tp"})],
)
def test_biases_of_experts_count_once(ranks: int, cut: dict[str, str]) -> None:
    """Experts whose width is cut, with sequence parallelism too, and experts that lie on different ranks."""
    run = Run(Mesh(tp=ranks), Plan(cut), mixture)
    values, batch = values_of(run), batch_of([8, 5])
    values["experts.down_bias"] = torch.ones_like(values["experts.down_bias"])
    assert_gradients(agreed(run, batch, values), *one_device(run, values).gradients(batch))
    assert_equals_one_device(run, [batch], values)


# Local computations (torchtitan#1805, pytorch#172932)


@pytest.mark.case("TP-03")
@pytest.mark.quick
def test_a_whole_parameter_in_a_computation_of_the_part() -> None:
    """Rank r uses a parameter times r + 1: its gradient is 1 + 2 + 3 + 4 on every rank."""
    run = Run(Mesh(tp=4), Plan({"ffn": "tp"}), numbered_model)
    values = {name: torch.ones(4, dtype=torch.float64) for name in ("parts.0.weight", "parts.0.gain")}
    batch = batch_of([8, 5])
    gradients = agreed(run, batch, values).gradients
    assert gradients["parts.0.weight"].tolist() == [10.0] * 4
    assert gradients["parts.0.gain"].tolist() == [4.0, 8.0, 12.0, 16.0]
    assert_equals_one_device(run, [batch] * 2, values)


@pytest.mark.case("TP-03")
@pytest.mark.parametrize("plan", [*PLANS.values(), standard(3)], ids=[*PLANS, "standard"])
def test_a_backward_written_by_hand(plan: Plan) -> None:
    mesh = Mesh(dp=2, tp=2) if "batch" in plan.compute else Mesh(tp=4)
    assert_equals_one_device(Run(mesh, plan, biased), [batch_of([8, 5])] * 2)


@pytest.mark.case("TP-03")
@pytest.mark.parametrize("plan", [Plan({"res": "tp"}), Plan({"seq": "tp", "res": "tp"})], ids=["whole", "cut"])
def test_a_loss_in_chunks(plan: Plan) -> None:
    """Plain PyTorch that knows nothing of layouts: logits of two positions at a time, computed again in backward."""
    assert_equals_one_device(Run(Mesh(tp=4), plan, chunked), [batch_of([8, 5])] * 2)


@pytest.mark.case("TP-03")
def test_a_signature_that_forgets_what_is_partial_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and loss of a region may be right while its gradients are not: the law sees both."""
    wrong = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +ffn -> batch res embed",
        params={"up": "ffn embed", "up_bias": "ffn", "down": "embed ffn", "down_bias": "embed"},  # not +ffn
        cuts="batch seq ffn",
    )
    monkeypatch.setattr(BiasedMLP, "region", wrong)
    report = check_regions(biased(layers=1), ks=(2,))
    assert {(v.region, v.cut) for v in report.violations} == {("layers.0.mlp", "ffn")}


# Fewer kv heads than ranks (transformers#48307)


@pytest.mark.case("TP-05")
@pytest.mark.quick
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("plan", PLANS)
def test_fewer_kv_heads_than_ranks_are_refused_at_once(plan: str, kv_heads: int) -> None:
    with pytest.raises(PlanError) as error:
        Run(Mesh(tp=4), PLANS[plan], changes={"kv_heads": kv_heads}).program()
    text = str(error.value)
    assert f"kv_heads: {kv_heads} does not divide over tp=4 (heads: 4): use kv_heads of 4" in text.replace(
        "kv_heads and core_kv_heads", "kv_heads"
    )
    assert "tp of 1" in text
    assert ("tp of 1 or 2" in text) == (kv_heads == 2)
    assert "leave it whole: kv_heads and core_kv_heads -> ()" in text


@pytest.mark.case("TP-05")
@pytest.mark.parametrize(("sequence", "kv_heads"), [({}, 1), ({"res": "tp"}, 1), ({"res": "tp"}, 2)])
def test_kv_heads_whole_on_every_rank(sequence: dict[str, str], kv_heads: int) -> None:
    plan = Plan({**dict.fromkeys(("heads", "core_heads", "ffn", "vocab"), "tp"), **sequence})
    run = Run(Mesh(tp=4), plan, changes={"kv_heads": kv_heads})
    assert_equals_one_device(run, [batch_of([8, 5], seed=i) for i in range(5)], values_of(run))


@pytest.mark.case("TP-05")
@pytest.mark.parametrize("mesh", [Mesh(group=2, member=2), Mesh(member=2, group=2)], ids=str)
def test_kv_heads_shared_by_groups_of_ranks(mesh: Mesh) -> None:
    """Two kv heads on four ranks: each kv head lies on the two ranks whose query heads read it."""
    both = ("group", "member")
    plan = Plan({**dict.fromkeys(("heads", "core_heads", "ffn"), both),
                 **dict.fromkeys(("kv_heads", "core_kv_heads"), "group")})  # fmt: skip
    run = Run(mesh, plan)
    assert_equals_one_device(run, [batch_of([8, 5], seed=i) for i in range(5)], values_of(run))
