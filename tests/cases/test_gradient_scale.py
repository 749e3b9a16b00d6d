"""The norm counts every parameter once, and gradients are means over tokens whatever the mesh.

Sources: NVIDIA-NeMo/RL#3788, ROCm/TransformerEngine#715, mindspore-ai/hyper-parallel#526, pytorch/pytorch#155903,
NVIDIA/Megatron-LM#3023, verl-project/verl#4250.
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
    values_of,
)

from dtensor_lm import Mesh, Plan
from dtensor_lm.sharding_plans import standard
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
@pytest.mark.parametrize(("zero", "sequence_parallel"), ZERO_AND_SP)
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


EIGHT = [4, 8, 1, 0, 7, 3, 5, 2]  # real labels of eight sequences
SMALL = [
    Run(Mesh(dp=2, tp=2), batch=8, micro_batches=2),
    Run(Mesh(dp=4), batch=8, micro_batches=2),
    Run(Mesh(dp=4), standard(2), batch=8, micro_batches=2),
    Run(Mesh(dp=2, fsdp=2), batch=8),
    Run(Mesh(fsdp=2, dp=2), standard(3), batch=8, micro_batches=2),
]
LARGE = [Run(Mesh(dp=8), batch=8), Run(Mesh(dp=2, fsdp=4), batch=8), Run(Mesh(dp=4, fsdp=2), batch=8)]


def first_gradients_of(runs: list[Run], batch: Whole, values: Whole) -> list[Found]:
    return [first_gradients(run, batch, values) for run in runs]


@pytest.mark.case("GRAD-04")
@pytest.mark.parametrize(("ranks", "runs"), [(4, SMALL), (8, LARGE)])
def test_eight_sequences_on_every_layout(ranks: int, runs: list[Run]) -> None:
    """Replicas, shards, tensor parallelism and micro-batches: no factor of any of them is in the gradients."""
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
