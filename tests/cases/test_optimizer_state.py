"""Master weights, sums of gradients, weight decay, and that the optimizer trains the parameters that the model uses.

Sources: vllm-project/speculators#765, areal-project/AReaL#1292, pytorch/pytorch#194434, pytorch/pytorch#106395,
ServiceNow/Fast-LLM#545, nvidia-cosmos/cosmos-predict2.5#165, facebookresearch/fairscale#697, pytorch/pytorch#149205.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from case_models import Sum, biased, is_matrix, values_model
from case_runs import Run, Whole, batch_of, step_of, values_of

import dtensor_lm as dl
from dtensor_lm import Mesh, Plan
from dtensor_lm.sharding_plans import ddp, standard, zero3
from dtensor_lm.state import DonatedStateError, local, locals_of, wrap
from dtensor_lm.testing.equivalence import gathered, parts

NAME = "parts.0.weight"


def whole_batch(rows: list[list[int]]) -> Whole:
    tokens = torch.tensor(rows)
    return {"tokens": tokens, "labels": torch.zeros_like(tokens)}


# Small updates and sums in bfloat16 (AReaL#1292, pytorch#106395)


def after_100_steps(run: Run) -> dict[str, torch.Tensor]:
    step = step_of(run, dl.adamw(lr=1e-3))
    state, mine = step.init(), parts(step.program, whole_batch([[3], [3]]), step.device)
    for _ in range(100):
        state, _ = step(state, mine)
    slots = {slot: gathered(tensors)[NAME] for slot, tensors in state.optimizer.items()}
    return {"parameter": gathered(state.parameters)[NAME], **slots}


@pytest.mark.case("NUM-02")
@pytest.mark.parametrize("plan", [ddp(), zero3()], ids=["ddp", "zero3"])
def test_a_bf16_weight_at_one_moves_as_in_fp32(plan: Plan) -> None:
    low, full = (Run(Mesh(dp=2), plan, values_model, dtype=dtype, seq=1) for dtype in ("bfloat16", "float32"))
    found, expected = low.everywhere(after_100_steps)[0], full.everywhere(after_100_steps)[0]
    assert {n: x.dtype for n, x in found.items()} == {
        "parameter": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32
    }  # fmt: skip
    assert torch.equal(found["master"], expected["parameter"])
    assert torch.equal(found["parameter"], expected["parameter"].bfloat16())
    assert (found["parameter"] < 0.91).all()
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.full_like(weight, 3.0)
        optimizer.step()
    assert (weight == 1).all()  # without master weights it never moves


ORDERS = list(itertools.permutations((256, 1, -256, 0)))
SUMS = {
    "micro-batches": (Run(Mesh(), ddp(), values_model, batch=4, seq=1, micro_batches=4, dtype="bfloat16"), (4, 1)),
    "zero3 micro-batches": (
        Run(Mesh(dp=2), zero3(), values_model, batch=8, seq=1, micro_batches=4, dtype="bfloat16"), (4, 1)
    ),
    "replicas": (Run(Mesh(dp=4), ddp(), values_model, batch=4, seq=1, dtype="bfloat16"), (4, 1)),
    "shards": (Run(Mesh(dp=4), zero3(), values_model, batch=4, seq=1, dtype="bfloat16"), (4, 1)),
    "whole, on parts of a sequence": (
        Run(Mesh(tp=4), Plan({"seq": "tp"}), values_model, batch=1, seq=4, dtype="bfloat16"), (1, 4)
    ),
}  # fmt: skip


def sums(run: Run, shape: tuple[int, int]) -> list[list[float]]:
    """Gradients of 256, 1, -256 and 0, in every order, summed over ranks or micro-batches."""
    step, found = step_of(run), []
    state = step.init()
    for order in ORDERS:
        batch = whole_batch(torch.tensor(order).view(shape).tolist())
        if run.batch == 8:  # two ranks: the second has zeros
            batch = {n: torch.stack([x, torch.zeros_like(x)], 1).view(8, 1) for n, x in batch.items()}
        gradients, *_ = step.gradients(state, parts(step.program, batch, step.device))
        layout = step.program.parameters[NAME].optimizer
        found.append(gathered({NAME: wrap(gradients[NAME], layout)})[NAME].tolist())
    return found


@pytest.mark.case("NUM-02")
@pytest.mark.quick
@pytest.mark.parametrize("way", SUMS)
def test_256_and_1_and_minus_256_are_1(way: str) -> None:
    run, shape = SUMS[way]
    assert run.everywhere(sums, shape) == [[[1.0] * 4] * len(ORDERS)] * run.mesh.size
    low = [torch.tensor(order, dtype=torch.bfloat16) for order in ORDERS]
    assert any(((x[0] + x[1]) + x[2]) + x[3] != 1 for x in low)


# Weight decay by name and role, not by the shape of a shard (Fast-LLM#545, fairscale#697)

LAYOUTS = [
    *(Run(Mesh(dp=2), standard(zero), biased) for zero in (0, 1, 3)),
    Run(Mesh(tp=2), standard(), biased),
    Run(Mesh(tp=2), standard(sequence_parallel=False), biased),
]


def one_step_of_decay(run: Run, values: Whole) -> Whole:
    """AdamW with zero gradients."""
    step = step_of(run, dl.adamw(lr=0.1, weight_decay=0.1), clip_norm=1.0)
    state, metrics = step(step.load(values), parts(step.program, batch_of([0, 0]), step.device))
    assert (metrics.loss, metrics.grad_norm, metrics.tokens) == (0, 0, 0)
    return gathered(state.parameters)


@pytest.mark.case("NUM-04")
@pytest.mark.quick
@pytest.mark.parametrize("run", LAYOUTS, ids=["zero 0", "zero 1", "zero 3", "tp_sp", "tp"])
def test_matrices_decay_and_nothing_else(run: Run) -> None:
    values = values_of(run)
    found = run.everywhere(one_step_of_decay, values)[0]
    shapes = {values[n].dim() for n in values if is_matrix(n)}, {values[n].dim() for n in values if not is_matrix(n)}
    assert shapes == ({2, 3}, {0, 1, 2})  # weights of two and three dims; scalars, vectors and a bias of two dims
    for name, value in values.items():
        if is_matrix(name):
            torch.testing.assert_close(found[name], 0.99 * value, rtol=1e-15, atol=0)
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.quick
@pytest.mark.case("NUM-04")
@pytest.mark.parametrize("run", LAYOUTS, ids=["zero 0", "zero 1", "zero 3", "tp_sp", "tp"])
def test_a_program_lists_what_decays_by_name(run: Run) -> None:
    """The same for every layout; `plan` prints it."""
    program = run.program()
    found = {p["name"]: p["weight_decay"] for p in program.as_dict()["parameters"]}
    assert found == {name: is_matrix(name) for name in found}
    assert len(found) == 2 + 1 + 2 * 17
    lines = [line.split() for line in str(program).split("\n\n")[1].splitlines()[1:]]
    shown = {line[0]: "decays" in line for line in lines}
    assert shown == {name: is_matrix(name) for name in shown}
    assert {name for name, decays in shown.items() if decays} == {
        "embed.weight", "head.loss.weight", "layers.*.mlp.up", "layers.*.mlp.down",
        *(f"layers.*.attention.{n}" for n in ("wq", "wk", "wv", "wo")),
    }  # fmt: skip


# The optimizer and the model have the same parameters (pytorch#149205)


def trained(run: Run, values: Whole) -> tuple[list[str], list[str], bool]:
    """Parameters that stayed: after one step with an earlier forward, after a parameter was changed by hand."""
    step = step_of(run, dl.adamw(lr=1e-2))
    mine = parts(step.program, batch_of([8, 5]), step.device)
    state = step.load(values)
    step.evaluate(state, mine)
    old = state
    state, _ = step(state, mine)
    after = gathered(state.parameters)
    stayed = [n for n, x in after.items() if not (x != values[n]).any()]
    name = "head.norm.weight"
    with pytest.raises(TypeError):  # a tensor in its place would be lost
        state.parameters[name] = state.parameters[name]  # type: ignore[index]
    local(state.parameters[name]).fill_(3.0)
    replaced = {n: x.clone() for n, x in gathered(state.parameters).items()}
    state, _ = step(state, mine)
    again = gathered(state.parameters)
    assert (again[name] - 3.0).abs().max() < 0.1
    donated = False
    try:
        step(old, mine)
    except DonatedStateError:
        donated = True
    return stayed, [n for n, x in again.items() if not (x != replaced[n]).any()], donated


@pytest.mark.case("NUM-05")
@pytest.mark.parametrize("run", [LAYOUTS[1], LAYOUTS[2], LAYOUTS[3]], ids=["zero 1", "zero 3", "tp_sp"])
def test_every_parameter_is_trained(run: Run) -> None:
    for stayed, stayed_again, donated in run.everywhere(trained, values_of(run)):
        assert stayed == stayed_again == []
        assert donated  # a state that a step was given cannot be trained on unnoticed


def trained_pairs(run: Run) -> bool:
    """Two steps of one Program, the second made after the first has trained, act on the state they are given."""
    first, second = step_of(run), step_of(run)
    mine = parts(first.program, batch_of([8, 5]), first.device)
    state, _ = first(first.init(), mine)
    state, _ = second(state, mine)
    other, _ = first(first.init(), mine)
    other, _ = first(other, mine)
    return all(torch.equal(x, locals_of(other.parameters)[n]) for n, x in locals_of(state.parameters).items())


@pytest.mark.case("NUM-05")
@pytest.mark.quick
def test_a_step_has_no_parameters_of_its_own() -> None:
    assert all(Run(Mesh(dp=2), standard(3)).everywhere(trained_pairs))


def stale_optimizers(run: Run) -> list[str]:
    """What is said to an optimizer that already holds parameters, and to a model that has none."""
    model, said = run.model(), []
    program = run.program()
    for parameters in (
        model.parameters(),
        [torch.nn.Parameter(torch.ones(1))],
        locals_of(step_of(run).init().parameters),
    ):
        values = list(parameters.values() if isinstance(parameters, dict) else parameters)
        optimizer = torch.optim.SGD([x.detach().requires_grad_() for x in values], lr=0.1)
        with pytest.raises(dl.UserError) as error:
            dl.train_step(program, optimizer, device="cpu")  # type: ignore[arg-type]
        said.append(str(error.value).splitlines()[-1])
    return said


@pytest.mark.case("NUM-05")
def test_an_optimizer_that_holds_parameters_is_refused() -> None:
    """Made before or after the plan is applied: only values of its options are taken, never tensors."""
    for said in Run(Mesh(dp=2), standard(3)).everywhere(stale_optimizers):
        assert len(said) == 3
        assert all(line.endswith("make it with dtensor_lm.adamw(...) or dtensor_lm.sgd(...)") for line in said)


@pytest.mark.quick
@pytest.mark.case("NUM-05")
def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(dl.ModelError, match="the model has no parameters"):
        Run(Mesh(dp=2), ddp(), lambda: dl.abstract(Sum)).program()
