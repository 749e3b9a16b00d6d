"""Every unmasked token weighs the same, however tokens are spread over ranks, micro-batches and evaluation batches.

Sources: pytorch/torchtitan#1842, pytorch/torchtitan#2206, pytorch/torchtitan#4167, pytorch/torchtitan#1618,
huggingface/transformers#34191, meta-pytorch/torchtune#1875, PrimeIntellect-ai/prime-rl#1957.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from case_models import values_model
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

import dtensor_lm as dl
from dtensor_lm import Mesh, Plan
from dtensor_lm.data import evaluation_batches
from dtensor_lm.ops.cross_entropy import IGNORE
from dtensor_lm.sharding_plans import ddp, standard
from dtensor_lm.state import locals_of
from dtensor_lm.testing.equivalence import parts, relative


def rows(batch: Whole, start: int, stop: int) -> Whole:
    return {name: x[start:stop] for name, x in batch.items()}


# Ranks and micro-batches with different numbers of real labels (torchtitan#1842, transformers#34191)


def assert_no_mean_of_means(run: Run, batch: Whole, groups: list[Whole]) -> None:
    """The run equals one device on all tokens together, which is far from the mean over groups of their means."""
    values = values_of(run)
    reference = one_device(run, values)
    loss, gradients, norm = reference.gradients(batch)
    assert_gradients(agreed(run, batch, values), loss, gradients, norm)
    naive = [reference.gradients(group) for group in groups]
    assert abs(sum(part[0] for part in naive) / len(naive) - loss) > 0.01 * loss
    for name, gradient in gradients.items():
        mean = sum(part[1][name] for part in naive) / len(naive)
        assert relative(mean, gradient) > 0.01, name


@pytest.mark.case("LOSS-01")
@pytest.mark.parametrize(
    "zero", [pytest.param(0, marks=pytest.mark.quick), 1, 2, pytest.param(3, marks=pytest.mark.quick)]
)
def test_ranks_with_7_labels_and_1(zero: int) -> None:
    batch = batch_of([7, 1])
    run = Run(Mesh(dp=2), standard(zero))
    assert_no_mean_of_means(run, batch, [rows(batch, 0, 1), rows(batch, 1, 2)])
    assert_equals_one_device(run, [batch] * 3, values_of(run))


@pytest.mark.case("LOSS-01")
@pytest.mark.parametrize("zero", [0, 3])
def test_four_ranks_of_which_one_has_no_label(zero: int) -> None:
    batch = batch_of([7, 1, 0, 4])
    run = Run(Mesh(dp=4), standard(zero), batch=4)
    assert_no_mean_of_means(run, batch, [rows(batch, i, i + 1) for i in (0, 1, 3)])
    assert_equals_one_device(run, [batch] * 3, values_of(run))


@pytest.mark.case("LOSS-02")
@pytest.mark.parametrize(("ranks", "real"), [(1, [8, 4, 2, 1]), (2, [8, 0, 1, 3, 2, 0, 0, 1])])
def test_micro_batches_with_8_4_2_and_1_labels(ranks: int, real: list[int]) -> None:
    batch = batch_of(real)
    run = Run(Mesh(dp=ranks), ddp(), batch=len(real), micro_batches=4)
    assert_no_mean_of_means(run, batch, [rows(batch, m * ranks, (m + 1) * ranks) for m in range(4)])
    # The reference takes the concatenated batch at once: five steps of SGD end at the same parameters.
    assert_equals_one_device(run, [batch, *(batch_of(real, seed=i) for i in range(1, 5))], values_of(run))


# Evaluation (torchtitan#4167, torchtitan#1618)


class Text:
    """Documents of 6 windows of 8 tokens."""

    def __len__(self) -> int:
        return 49

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.random.default_rng(0).integers(0, 32, 49).astype(np.uint8)[start:stop]


def validation(step: object, sequences: int) -> list[Whole]:
    """This rank's rows of the evaluation."""
    program = step.program
    batches = evaluation_batches(Text(), batch=program.batch, seq=program.seq, sequences=sequences)
    found = []
    for i in range(len(batches)):
        tokens, labels = map(torch.from_numpy, batches.rows(i, range(program.batch)))
        whole = {"tokens": tokens, "labels": labels}
        found += parts(program, whole, step.device)
    return found


def evaluated(run: Run, sequences: int, values: Whole) -> float:
    step = step_of(run)
    return step.evaluate(step.load(values), validation(step, sequences))


@pytest.mark.case("LOSS-04", "LIFE-03")
@pytest.mark.parametrize("sequences", [5, 3])
def test_evaluation_is_one_number_on_every_layout(sequences: int) -> None:
    """5 and 3 sequences, which neither 2 nor 4 divides: it ends, and every sequence counts once."""
    layouts = [
        *(Run(Mesh(), batch=b) for b in (1, 2, 5)),
        *(Run(Mesh(dp=2), ddp(), batch=b) for b in (2, 4)),
        *(Run(Mesh(dp=n), standard(3), batch=n) for n in (2, 4)),
        Run(Mesh(dp=2, tp=2), batch=2),
        Run(Mesh(cp=2), Plan({"seq": "cp", "res": "cp"}), batch=2),  # whole keys and values, parts of the queries
    ]
    values = values_of(layouts[0])
    every = evaluation_batches(Text(), batch=sequences, seq=8, sequences=sequences).rows(0, range(sequences))
    tokens, labels = map(torch.from_numpy, every)
    assert (labels != IGNORE).all()
    expected, _, _ = one_device(layouts[0], values).gradients({"tokens": tokens, "labels": labels})
    for run in layouts:
        for loss in run.everywhere(evaluated, sequences, values):
            assert loss == pytest.approx(expected, rel=1e-13, abs=0), run
    # With batches of 2 the last one has a single sequence, and the mean of batch means is another number.
    means = [one_device(layouts[0], values).gradients(
        {"tokens": tokens[i : i + 2], "labels": labels[i : i + 2]})[0] for i in range(0, sequences, 2)]  # fmt: skip
    assert abs(sum(means) / len(means) - expected) > 1e-3 * expected


def evaluate_sums(run: Run) -> float:
    """Batches whose (sum of losses, tokens) are (2, 1) and (90, 9); each rank of two holds some of the tokens."""
    step = step_of(run)
    tokens = [torch.full((2, 9), value) for value in (2, 10)]
    labels = [torch.full((2, 9), IGNORE) for _ in range(2)]
    labels[0][0, 3] = 0
    labels[1][0, :2] = labels[1][1, 2:] = 0
    batches = [{"tokens": t, "labels": m} for t, m in zip(tokens, labels, strict=True)]
    return step.evaluate(step.init(), [part for b in batches for part in parts(step.program, b, step.device)])


@pytest.mark.case("LOSS-04")
@pytest.mark.quick
@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_of_2_over_1_and_90_over_9(ranks: int) -> None:
    run = Run(Mesh(dp=ranks), ddp(), values_model, {"embed": 1}, batch=2, seq=9)
    assert run.everywhere(evaluate_sums) == [pytest.approx(9.2, rel=1e-15)] * ranks  # not 6.0


def steps_around_an_evaluation(run: Run) -> tuple[float, float]:
    """Training loss and evaluation loss of one batch. Asserts that an evaluation leaves no trace."""
    batch = batch_of([8, 5])
    after = []
    evaluation = math.nan
    for evaluates in (False, True):
        step = step_of(run, dl.adamw(lr=1e-2), clip_norm=1.0)
        mine = parts(step.program, batch, step.device)
        state, _ = step(step.init(3), mine)
        before = copy.deepcopy((locals_of(state.parameters), {s: locals_of(t) for s, t in state.optimizer.items()}))
        if evaluates:
            evaluation = step.evaluate(state, mine)
            assert all(m.training for m in step.runner.module.modules())
            held = locals_of(state.parameters), {s: locals_of(t) for s, t in state.optimizer.items()}
            torch.testing.assert_close(held, before, rtol=0, atol=0)
        state, metrics = step(state, mine)
        after.append((metrics, locals_of(state.parameters)))
    (one, parameters), (other, others) = after
    assert one == other
    assert all(torch.equal(others[n], p) for n, p in parameters.items())
    return one.loss, evaluation


@pytest.mark.case("LOSS-04")
@pytest.mark.quick
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2), Mesh(tp=2)], ids=str)
def test_an_evaluation_leaves_no_trace(mesh: Mesh) -> None:
    run = Run(mesh, standard(3), changes={"label_smoothing": 0.1}, dtype="float32")
    for training, evaluation in run.everywhere(steps_around_an_evaluation):
        assert training != evaluation  # smoothing is for training only
