"""The norm counts every parameter once, and gradients are means over tokens whatever the mesh.

Sources: NVIDIA-NeMo/RL#3788, ROCm/TransformerEngine#715, mindspore-ai/hyper-parallel#526, pytorch/pytorch#155903,
NVIDIA/Megatron-LM#3023, verl-project/verl#4250, pytorch/pytorch#180346, pytorch/torchtitan#596,
deepspeedai/DeepSpeed#8475, NVIDIA/Megatron-LM#5916.
"""

from __future__ import annotations

import math

import pytest
import torch
from case_models import biased, ones_model
from case_runs import (
    Found,
    Run,
    Whole,
    agreed,
    assert_equals_one_device,
    assert_gradients,
    batch_of,
    first_gradients,
    one_device,
    step_of,
    values_of,
)
from expert_models import GRADIENTS, four_experts

from dtensor_lm import Mesh, Plan
from dtensor_lm.sharding_plans import standard
from dtensor_lm.state import order
from dtensor_lm.testing.equivalence import gathered, parts
from dtensor_lm.testing.workers import pool

ZERO_AND_SP = [(0, False), (0, True), (3, False), (3, True)]


@pytest.mark.case("GRAD-01")
@pytest.mark.quick
@pytest.mark.parametrize(("zero", "sequence_parallel"), ZERO_AND_SP)
def test_the_norm_of_ones_is_the_root_of_the_number_of_parameters(zero: int, sequence_parallel: bool) -> None:
    run = Run(Mesh(dp=2, tp=2), standard(zero, sequence_parallel), ones_model)
    batch = batch_of([8, 5])
    found = agreed(run, batch, values_of(run))
    assert all((gradient == 1).all() for gradient in found.gradients.values())
    parameters = run.program().parameters.values()
    distinct = sum(math.prod(p.storage.shape) for p in parameters)
    with_copies = sum(p.optimizer.local_numel() for p in parameters) * (2 if zero == 0 else 4)
    assert distinct == 2 * 8 * 16 + 16 + 8 + 8
    assert found.norm == math.sqrt(distinct)
    assert zero == 0 or math.sqrt(with_copies) > found.norm


@pytest.mark.case("GRAD-01")
@pytest.mark.parametrize(("zero", "sequence_parallel"), [(0, True), (3, False)])
def test_norm_and_clipping_with_norms_and_biases(zero: int, sequence_parallel: bool) -> None:
    """Parameters after steps that clip to half of the norm equal those of one device."""
    run = Run(Mesh(dp=2, tp=2), standard(zero, sequence_parallel), biased)
    batch, values = batch_of([8, 5]), values_of(run)
    _, gradients, norm = one_device(run, values).gradients(batch)
    assert_equals_one_device(run, [batch] * 2, values)
    copied = {n for n, p in run.program().parameters.items() if p.optimizer.copies > 1}
    assert copied
    twice = math.sqrt(sum(float(g.square().sum()) * (2 if n in copied else 1) for n, g in gradients.items()))
    assert twice > 1.01 * norm


# One norm over parameters in different layouts (pytorch#180346, DeepSpeed#8475)

EXPERTS = [
    Run(Mesh(ep=2), Plan({"expert": "ep"}), four_experts),
    Run(Mesh(ep=2, dp=2), Plan({"expert": "ep", "batch": "dp"}), four_experts),
    Run(Mesh(dp=2, ep=2), Plan({"expert": "ep", "batch": "dp"}, optimizer={"expert": ("ep", "dp")}), four_experts),
    Run(Mesh(fsdp=2), Plan({"batch": "fsdp"}, {"expert": "fsdp"}), four_experts),
]


def after_a_clipped_step(run: Run, batch: Whole, clip_norm: float) -> tuple[float, Whole]:
    """The norm, and parameters after one step of SGD at a rate of 0.1."""
    step = step_of(run, clip_norm=clip_norm)
    state, metrics = step(step.init(), parts(step.program, batch, step.device))
    return metrics.grad_norm, gathered(state.parameters)


@pytest.mark.case("GRAD-02")
@pytest.mark.parametrize("run", EXPERTS, ids=lambda run: f"{run.mesh}")
def test_experts_of_different_ranks_have_one_norm(run: Run) -> None:
    """The square root of 120, not the mean of the norms of two ranks, 10 and 4.472136; and one factor for all."""
    assert (10 + math.sqrt(20)) / 2 == pytest.approx(7.236068, abs=1e-6)
    for norm, after in run.everywhere(after_a_clipped_step, batch_of([8, 5]), math.sqrt(120) / 2):
        assert norm == pytest.approx(10.954452, abs=1e-6)
        assert norm == pytest.approx(math.sqrt(120), rel=1e-15)
        expected = 1 - 0.1 * 0.5 * torch.tensor(GRADIENTS, dtype=torch.float64)
        torch.testing.assert_close(after["parts.0.weight"], expected, rtol=1e-7, atol=0)


@pytest.mark.case("GRAD-02")
def test_one_norm_over_parameters_of_every_layout() -> None:
    """In 1, 2 and 4 copies, some of them on a device mesh whose axes stand in another order than the run's."""
    both = ("tp", "dp")
    plan = Plan({"batch": "dp", "ffn": "tp"}, {"ffn": both, "vocab": both, "head_dim": "dp"})
    run = Run(Mesh(dp=2, tp=2), plan, biased)
    stored = [p.optimizer for p in run.program().parameters.values()]
    assert {layout.copies for layout in stored} == {1, 2, 4}
    assert {order(layout) for layout in stored} == {("dp", "tp"), both}
    batch, values = batch_of([8, 5]), values_of(run)
    assert_gradients(agreed(run, batch, values), *one_device(run, values).gradients(batch))
    assert_equals_one_device(run, [batch], values)  # clipped to half of the norm


EIGHT = [4, 8, 1, 0, 7, 3, 5, 2]  # real labels of eight sequences
SMALL = [
    Run(Mesh(dp=2, tp=2), batch=8, micro_batches=2),
    Run(Mesh(dp=4), batch=8, micro_batches=2),
    Run(Mesh(dp=4), standard(2), batch=8, micro_batches=2),
    Run(Mesh(dp=2, fsdp=2), batch=8),
    Run(Mesh(fsdp=2, dp=2), standard(3), batch=8, micro_batches=2),
    Run(Mesh(dp=2, cp=2), Plan({"batch": "dp", "seq": "cp", "res": "cp"}), batch=8, micro_batches=2),
]
LARGE = [Run(Mesh(dp=8), batch=8), Run(Mesh(dp=2, fsdp=4), batch=8), Run(Mesh(dp=4, fsdp=2), batch=8)]


def first_gradients_of(runs: list[Run], batch: Whole, values: Whole) -> list[Found]:
    return [first_gradients(run, batch, values) for run in runs]


@pytest.mark.case("GRAD-04")
@pytest.mark.parametrize(("ranks", "runs"), [(4, SMALL), (8, LARGE)])
def test_eight_sequences_on_every_layout(ranks: int, runs: list[Run]) -> None:
    """Replicas, shards, tensor and sequence parallelism, micro-batches: no factor of any is in the gradients."""
    batch, values = batch_of(EIGHT), values_of(SMALL[0])
    expected = one_device(SMALL[0], values).gradients(batch)
    for results in pool(ranks).run(first_gradients_of, runs, batch, values):
        for run, found in zip(runs, results, strict=True):
            assert found.tokens == sum(EIGHT), run
            assert_gradients(found, *expected)


@pytest.mark.case("GRAD-04")
@pytest.mark.quick
def test_equal_copies_of_a_computation_are_not_summed() -> None:
    """Parameters in shards over an axis on which every rank computes the same: nothing is added up."""
    run = Run(Mesh(spare=2), Plan(storage={"embed": "spare"}), ones_model)
    found = agreed(run, batch_of([8, 5]), values_of(run))
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in found.gradients.values())
