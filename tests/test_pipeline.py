"""Every schedule computes what one device computes, with other axes inside its stages: loss, every gradient, the norm,
parameters after steps, collectives, sends and bytes. Every pair of settings meets at least once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor_lm as dl
from dtensor_lm.process_groups import group
from dtensor_lm.rounds import BoundShare
from dtensor_lm.schedules import KNOWN
from dtensor_lm.schedules.run import PipelineRunner, _Pass
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.testing.case import batch_of
from dtensor_lm.testing.equivalence import Report, compare
from dtensor_lm.testing.workers import pool

SPLITS = ("interleaved-zero-bubble", "zb-h1", "zb-v", "dualpipe-v")
LOOPS = ("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble")  # with any number of stages per rank

# schedule, stages per rank, mesh, micro-batches, layers, model, accumulate
RUNS: list[tuple[str, int, str, int, int, str, int]] = [
    ("gpipe", 1, "pp=2", 2, 7, "tied", 1),
    ("gpipe", 1, "pp=2,fsdp=2", 3, 4, "gpt", 2),
    ("gpipe", 1, "tp=2,pp=2", 4, 4, "plain", 1),
    ("1f1b", 1, "pp=2", 1, 4, "gpt", 1),
    ("1f1b", 1, "pp=2,fsdp=2", 4, 4, "tied", 1),
    ("1f1b", 1, "tp=2,pp=2", 3, 7, "plain", 2),
    ("1f1b", 1, "pp=4", 6, 7, "tied", 1),
    ("interleaved-1f1b", 2, "pp=2", 4, 4, "plain", 2),
    ("interleaved-1f1b", 3, "tp=2,pp=2", 2, 7, "tied", 1),
    ("interleaved-1f1b", 2, "pp=2,fsdp=2", 6, 4, "gpt", 1),
    ("looped-bfs", 2, "pp=2,fsdp=2", 3, 7, "plain", 1),
    ("looped-bfs", 3, "pp=2", 2, 7, "gpt", 2),
    ("looped-bfs", 2, "tp=2,pp=2", 4, 4, "tied", 1),
    ("interleaved-zero-bubble", 2, "pp=2,fsdp=2", 2, 4, "tied", 2),
    ("interleaved-zero-bubble", 3, "pp=2", 3, 7, "plain", 1),
    ("interleaved-zero-bubble", 2, "tp=2,pp=2", 4, 4, "gpt", 1),
    ("zb-h1", 1, "pp=3", 5, 7, "gpt", 1),
    ("zb-h1", 1, "pp=2,fsdp=2", 3, 4, "plain", 1),
    ("zb-h1", 1, "tp=2,pp=2", 2, 4, "tied", 2),
    ("zb-v", 2, "pp=2,fsdp=2", 4, 7, "tied", 1),
    ("zb-v", 2, "pp=2", 1, 4, "plain", 2),
    ("zb-v", 2, "tp=2,pp=2", 3, 4, "gpt", 1),
    ("dualpipe-v", 2, "pp=2", 5, 4, "tied", 1),
    ("dualpipe-v", 2, "pp=2,fsdp=2", 4, 7, "gpt", 2),
    ("dualpipe-v", 2, "pp=2,fsdp=2,tp=2", 4, 4, "plain", 1),
]
QUICK = {RUNS[i] for i in (4, 19)}


def program(
    schedule: str, virtual: int, mesh: str, micro: int, layers: int, model: str = "plain", accumulate: int = 1,
    *, plan: dl.Plan | None = None, **more: Any,
) -> Program:  # fmt: skip
    """Small, a row for each data rank of each micro-batch. micro: of one run of the schedule."""
    changes: dict[str, Any] = {"vocab": 32, "embed": 16, "heads": 2, "ffn": 16, "layers": layers}
    if model == "gpt":
        built = dl.models.build("tiny-gpt", **changes)  # with dropout; its head is tied
    else:
        built = dl.models.build("tiny", kv_heads=2, tied=model == "tied", **changes)
    plan = plan or dl.plans.standard(whole_gradients=schedule in SPLITS)
    return dl.resolve(
        built, plan, dl.Mesh.parse(mesh), seq=8, micro_batches=micro * accumulate, dtype="float64",
        schedule=schedule, virtual_stages=virtual, accumulate=accumulate, **more,
    )  # fmt: skip


def run(*settings: Any, steps: int = 2, labels: str = "some", **more: Any) -> Report:
    """labels: spread unevenly over rows, so over micro-batches and ranks."""
    made = program(*settings, **more)
    return compare(made, steps=steps, batches=[batch_of(made, labels, i) for i in range(max(steps, 1))])


def reports(mesh: str, *arguments: Any, **more: Any) -> list[Report]:
    return pool(dl.Mesh.parse(mesh).size).run(run, *arguments, timeout=110, **more)


def test_every_pair_of_settings_meets() -> None:
    meshes = ("pp=2", "pp=2,fsdp=2", "tp=2,pp=2")
    met = {(r[0], i, r[i]) for r in RUNS for i in (2, 5)} | {(r[0], 6, r[6] > 1) for r in RUNS}
    for schedule in KNOWN:
        wanted = [(2, m) for m in meshes if schedule not in ("zb-h1", "dualpipe-v")]
        wanted += [(5, m) for m in ("plain", "tied", "gpt")]
        for i, value in wanted:
            assert (schedule, i, value) in met, f"{schedule} never has {value}"
    for (i, one), (j, other) in combinations([(2, meshes), (5, ("plain", "tied", "gpt")), (4, (4, 7))], 2):
        for a, b in product(one, other):
            assert any(r[i] == a and r[j] == b for r in RUNS), f"{a} and {b} never meet"
    for schedule in LOOPS:
        assert {r[1] for r in RUNS if r[0] == schedule} == {2, 3}
    assert {r[3] % dl.Mesh.parse(r[2])["pp"] for r in RUNS} >= {0, 1} and any(r[6] > 1 for r in RUNS)


@pytest.mark.parametrize(
    "settings", [pytest.param(r, marks=pytest.mark.quick if r in QUICK else (), id="-".join(map(str, r))) for r in RUNS]
)
def test_equal_to_one_device(settings: tuple[Any, ...]) -> None:
    for report in reports(settings[2], *settings):
        assert report.ok, report


@pytest.mark.parametrize("labels", ["rows", "one", "none", "end"])
def test_labels_that_some_micro_batches_lack(labels: str) -> None:
    for report in reports("pp=2,fsdp=2", "1f1b", 1, "pp=2,fsdp=2", 4, 2, steps=1, labels=labels):
        assert report.ok, report


@pytest.mark.parametrize("zero, schedule", [(1, "zb-v"), (2, "interleaved-1f1b"), (3, "1f1b"), (3, "dualpipe-v")])
def test_zero_levels(zero: int, schedule: str) -> None:
    plan = dl.plans.standard(zero, whole_gradients=schedule in SPLITS)
    v = 1 if schedule == "1f1b" else 2
    for report in reports("pp=2,dp=2", schedule, v, "pp=2,dp=2", 4, 4, "tied", plan=plan, steps=1):
        assert report.ok, report


def test_stages_of_the_users_choice() -> None:
    for report in reports("pp=2", "zb-v", 2, "pp=2", 4, 7, "gpt", split=[3, 1, 2, 1], steps=1):
        assert report.ok, report


@pytest.mark.parametrize("schedule, virtual", [("1f1b", 1), ("zb-h1", 1)])
def test_eight_stages(schedule: str, virtual: int) -> None:
    for report in reports("pp=8", schedule, virtual, "pp=8", 8, 8, "tied", steps=1):
        assert report.ok, report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_lower_precisions(schedule: str, dtype: str) -> None:
    """Also that gradients of bfloat16 parameters accumulate in float32, in both halves of a backward."""
    for report in pool(4).run(_lower, schedule, dtype, timeout=110):
        assert report.ok, report


def _lower(schedule: str, dtype: str) -> Report:
    built = dl.models.build("tiny", layers=4, vocab=64, embed=32, ffn=64)
    plan = dl.plans.standard(whole_gradients=schedule in SPLITS)
    made = dl.resolve(built, plan, dl.Mesh(pp=2, fsdp=2), batch=8, seq=16, micro_batches=4, dtype=dtype,
                      schedule=schedule)  # fmt: skip
    return compare(made, steps=2)


def test_pipelines_after_others_in_the_same_processes() -> None:
    """Ranks of different stages need different groups, and must still meet in those that come later."""
    workers = pool(4)
    for mesh in ("pp=4", "dp=4", "pp=2,tp=2", "dp=2,tp=2", "tp=2,pp=2", "fsdp=4", "pp=2,dp=2"):
        settings = ("1f1b", 1, mesh, 4, 4, "tied") if "pp" in mesh else None
        for report in workers.run(_any, mesh, settings, timeout=60):
            assert report.ok, (mesh, report)


def _any(mesh: str, settings: tuple[Any, ...] | None) -> Report:
    if settings is not None:
        return run(*settings, steps=0)
    built = dl.models.build("tiny", layers=1, vocab=32, embed=16, heads=4, kv_heads=4, ffn=16)
    made = dl.resolve(built, dl.plans.standard(), dl.Mesh.parse(mesh), batch=4, seq=8, dtype="float64")
    return compare(made, steps=0)


def _groups() -> list[int]:
    """Ranks 0 and 3 make one group more than the others, then all meet."""
    mesh = dl.Mesh(pp=2, tp=2)
    from dtensor_lm.process_groups import prepare

    prepare(mesh, [("tp",), ("pp",), ("pp", "tp")])
    return [group(mesh, axes).size() for axes in (("tp",), ("pp",), ("pp", "tp"))]


def test_groups_are_made_in_one_order() -> None:
    assert pool(4).run(_groups, timeout=60) == [[2, 2, 4]] * 4


# What a fault would look like


def _no_share(self: BoundShare, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {}


def _scaled(runner: PipelineRunner) -> None:
    runner.engine.scale_grads = True


@contextmanager
def broken(what: str) -> Iterator[None]:
    """The runtime with one fault."""
    patch = pytest.MonkeyPatch()
    made = PipelineRunner.__init__
    try:
        if what == "tied gradients not added":
            patch.setattr(BoundShare, "reduce", _no_share)
        elif what == "norm counts copies":
            patch.setattr(Program, "home", lambda *_: True)
        elif what == "loss of the last run only":
            real = PipelineRunner._run

            def only_last(self: PipelineRunner, training: bool, given: _Pass) -> Tensor:
                found = real(self, training, given)
                return found if given.moment.row else found * 0

            patch.setattr(PipelineRunner, "_run", only_last)
        elif what == "gradients divided":

            def divided(self: PipelineRunner, *args: Any) -> None:
                made(self, *args)
                _scaled(self)

            patch.setattr(PipelineRunner, "__init__", divided)
        elif what == "tokens of every stage":
            patch.setattr(PipelineRunner, "has_last", True)
        yield
    finally:
        patch.undo()


def _broken(what: str, *settings: Any) -> Report:
    with broken(what):
        return run(*settings, steps=1)


FAULTS: dict[str, Callable[[Report], bool]] = {
    "tied gradients not added": lambda r: r.max_grad_error > 1e-2 and r.loss_error < 1e-10 and not r.replicas_equal,
    "norm counts copies": lambda r: r.grad_norm_error > 1e-3 and r.max_grad_error < 1e-10,
    "loss of the last run only": lambda r: r.loss_error > 1e-2 and r.max_grad_error < 1e-10,
    "gradients divided": lambda r: r.max_grad_error > 0.1 and r.loss_error < 1e-10,
    "tokens of every stage": lambda r: r.loss_error > 0.1,
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_seen(what: str) -> None:
    accumulate = 2 if "run" in what else 1
    report = pool(2).run(_broken, what, "1f1b", 1, "pp=2", 2, 2, "tied", accumulate, timeout=60)[0]
    assert not report.ok and FAULTS[what](report), report


# Evaluation


def _train_evaluate_train(schedule: str, virtual: int) -> tuple[list[float], list[float]]:
    """Losses of four steps, with and without evaluations between them; losses of evaluations are the first's."""
    made = program(schedule, virtual, "pp=2", 4, 4, "gpt")
    batches = [[{n: x[m : m + 1] for n, x in batch_of(made, "some", i).items()} for m in range(4)] for i in range(4)]
    found: list[list[float]] = []
    for evaluates in (True, False):
        step = dl.train_step(made, dl.sgd(lr=0.1), device="cpu")
        state, losses, evaluated = step.init(0), [], []
        for batch in batches:
            if evaluates:
                # Not a multiple of the schedule's micro-batches: the rest is filled up with masked ones.
                evaluated += [step.evaluate(state, [*batch, *batches[0]][:n]) for n in (4, 1, 6)]
                assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
        found += [losses, evaluated] if evaluates else [losses]
    with_evaluations, evaluated, without = found
    assert with_evaluations == without, "an evaluation changes the steps after it"
    return without, evaluated


def _evaluations_of_one_device() -> list[float]:
    built = program("gpipe", 1, "pp=2", 4, 4, "gpt").model
    made = dl.resolve(built, dl.plans.standard(), dl.Mesh(), batch=4, seq=8, micro_batches=4, dtype="float64")
    step = dl.train_step(made, dl.sgd(lr=0.1), device="cpu")
    batches = [[{n: x[m : m + 1] for n, x in batch_of(made, "some", i).items()} for m in range(4)] for i in range(4)]
    state, found = step.init(0), []
    for batch in batches:
        found += [step.evaluate(state, [*batch, *batches[0]][:n]) for n in (4, 1, 6)]
        state, metrics = step(state, batch)
        found.append(metrics.loss)
    return found


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    return pool(1).run(_evaluations_of_one_device, timeout=60)[0]


@pytest.mark.parametrize("schedule", KNOWN)
def test_train_evaluate_train(schedule: str, one_device: list[float]) -> None:
    virtual = KNOWN[schedule][2] or 2
    for losses, evaluated in pool(2).run(_train_evaluate_train, schedule, virtual, timeout=60):
        assert losses == pytest.approx(one_device[3::4], rel=1e-12)
        assert evaluated == pytest.approx([x for i, x in enumerate(one_device) if i % 4 != 3], rel=1e-12)
