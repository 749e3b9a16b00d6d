"""Pipelines: the scale of gradients, tied tables, uneven layers, micro-batches that do not fit, one norm for all.

Sources: pytorch/torchtitan#2972, pytorch/torchtitan#4194, pytorch/pytorch#144352, NVIDIA/Megatron-LM#656,
NVIDIA/Megatron-LM#7227, uw-syfi/piper#13, NVIDIA/Megatron-LM#1304, pytorch/torchtitan#963, NVIDIA/Megatron-LM#381,
pytorch/pytorch#126600, pytorch/torchtitan#775, pytorch/PiPPy#1064, pytorch/pytorch#180346, pytorch/torchtitan#596.
"""

from __future__ import annotations

import math
import time

import pytest
import torch
from case_runs import refused
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm.initial_values import abstract, draw, recipes
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.state import locals_of
from dtensor_lm.testing.case import batch_of
from dtensor_lm.testing.equivalence import Reference, Report, compare, parts
from dtensor_lm.testing.workers import pool


def program(
    mesh: dl.Mesh, schedule: str, *, layers: int = 2, tied: bool = False, batch: int = 8, **more: int
) -> Program:
    built = dl.models.build(
        "tiny", layers=layers, tied=tied, vocab=32, embed=16, heads=2, kv_heads=2, ffn=16, seq=8
    )  # fmt: skip
    return dl.resolve(built, dl.plans.standard(), mesh, batch=batch, dtype="float64", schedule=schedule, **more)


def _compared(made: Program, steps: int) -> Report:
    return compare(made, steps=steps, batches=[batch_of(made, "some", i) for i in range(max(steps, 1))])


@pytest.mark.case("PP-01")
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("schedule, virtual", [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)])
def test_gradients_and_norm_for_every_number_of_micro_batches(schedule: str, virtual: int, micro: int) -> None:
    mesh = dl.Mesh(pp=2, dp=2) if schedule == "1f1b" else dl.Mesh(pp=2)
    made = program(mesh, schedule, layers=2 * virtual, micro_batches=micro, virtual_stages=virtual)
    for report in pool(mesh.size).run(_compared, made, 0, timeout=60):
        assert report.ok, report


# PP-03


def _tied_steps(made: Program, steps: int) -> list[tuple[float, Tensor | None]]:
    """The norm of each step, and the tied table after it, where this rank stores it."""
    step = dl.train_step(made, dl.adamw(lr=0.01), clip_norm=0.05, device="cpu")
    state, found = step.init(0), []
    for i in range(steps):
        state, metrics = step(state, parts(made, batch_of(made, "some", i), step.device))
        found.append((metrics.grad_norm, dict(locals_of(state.parameters)).get("embed.weight")))
        found[-1] = (found[-1][0], None if found[-1][1] is None else found[-1][1].clone())
    return found


@pytest.mark.case("PP-03")
@pytest.mark.parametrize("mesh", [dl.Mesh(pp=2), dl.Mesh(pp=4), dl.Mesh(pp=2, dp=2)])
def test_twenty_steps_of_adam_with_a_tied_table(mesh: dl.Mesh) -> None:
    made = program(mesh, "1f1b", layers=4, tied=True, micro_batches=4)
    ranks = pool(mesh.size).run(_tied_steps, made, 20, timeout=90)
    values = {n: draw(recipes(made.model)[n], n, 0, p.storage.shape, [(0, s) for s in p.storage.shape], torch.float64)
              for n, p in made.parameters.items()}  # fmt: skip
    reference, norms = Reference(made, values), []
    optimizer = reference.adamw(dl.adamw(lr=0.01))
    for i in range(20):
        optimizer.zero_grad()
        reference.loss(batch_of(made, "some", i)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(reference.model.parameters(), 0.05)))
        optimizer.step()
        table = dict(reference.model.named_parameters())["embed.weight"]
        tables = [found[i][1] for found in ranks]
        stored = [x for x in tables if x is not None]
        assert len(stored) == mesh.size // mesh["pp"] * 2  # on the first and the last stage
        assert all(torch.equal(x, stored[0]) for x in stored), f"copies differ after step {i}"
        assert torch.allclose(stored[0], table.detach(), rtol=0, atol=1e-12), f"step {i}"
        assert all(found[i][0] == pytest.approx(norms[-1], rel=1e-10) for found in ranks)
    assert min(norms) > 0.05  # clipping was active throughout


class Halves(nn.Module):
    """A table that is used at both ends, with a gradient that is known: `value` in each of its elements."""

    region = dl.Region(
        {"tokens": "int batch seq", "labels": "int batch seq"}, "+batch +seq", {"table": "embed"}, cuts="batch seq"
    )

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(200))
        nn.init.constant_(self.table, 1.0)
        self.layers = nn.ModuleList(Passing() for _ in range(2))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = tokens.unsqueeze(-1) * self.table
        for layer in self.layers:
            x = layer(x)
        return (x + tokens.unsqueeze(-1) * self.table).sum()


class Passing(nn.Module):
    region = dl.Region({"x": "batch seq embed"}, "batch seq embed", {"w": "embed"}, cuts="batch seq embed")

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(200))
        nn.init.zeros_(self.w)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w * 0


def _norm() -> float:
    made = dl.resolve(abstract(Halves), dl.Plan({"layers": "pp"}), dl.Mesh(pp=2), batch=1, seq=1, dtype="float64",
                      micro_batches=1)  # fmt: skip
    step = dl.train_step(made, dl.sgd(), device="cpu")
    ones = torch.ones(1, 1, dtype=torch.int64)
    return step.gradients(step.init(0), [{"tokens": ones, "labels": ones}])[3]


@pytest.mark.case("PP-03")
def test_the_norm_of_a_shared_gradient_whose_square_is_800() -> None:
    """200 elements with a gradient of 1 from each end: 28.284, not 40."""
    assert pool(2).run(_norm, timeout=60) == [pytest.approx(math.sqrt(800))] * 2


# PP-04, PP-05


@pytest.mark.case("PP-04")
@pytest.mark.parametrize("layers, mesh, virtual", [(3, dl.Mesh(pp=2), 1), (5, dl.Mesh(pp=4), 1), (7, dl.Mesh(pp=2), 2)])
def test_layers_that_stages_do_not_divide(layers: int, mesh: dl.Mesh, virtual: int) -> None:
    schedule = "1f1b" if virtual == 1 else "interleaved-1f1b"
    made = program(mesh, schedule, layers=layers, micro_batches=4, virtual_stages=virtual)
    for report in pool(mesh.size).run(_compared, made, 1, timeout=60):
        assert report.ok, report


@pytest.mark.case("PP-04")
@pytest.mark.parametrize("layers, pp", [(1, 2), (2, 4)])
def test_fewer_layers_than_stages(
    layers: int, pp: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("plan", "check", "train"):
        said = refused([command, "--mesh", f"pp={pp}", "--layers", str(layers)], capsys, monkeypatch)
        assert f"{layers} layer{'s' * (layers > 1)} on {pp} stages: every stage needs a layer" in said


@pytest.mark.case("PP-05")
@pytest.mark.parametrize("batch, micro, near", [(8, 3, "2 or 4"), (2, 4, "nearest: 2"), (0, 1, "at least 1")])
def test_micro_batches_that_do_not_divide(
    batch: int, micro: int, near: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("check", "train"):
        began = time.monotonic()
        said = refused(
            [command, "--mesh", "pp=2", "--batch", str(batch), "--micro-batches", str(micro)], capsys, monkeypatch
        )
        assert near in said and (str(batch) in said or batch == 0), said
        assert time.monotonic() - began < 10


@pytest.mark.case("PP-05")
@pytest.mark.parametrize("schedule, mesh, micro", [("1f1b", dl.Mesh(pp=2), 1), ("gpipe", dl.Mesh(pp=4), 2)])
def test_fewer_micro_batches_than_stages(schedule: str, mesh: dl.Mesh, micro: int) -> None:
    made = program(mesh, schedule, layers=4, batch=4, micro_batches=micro)
    for report in pool(mesh.size).run(_compared, made, 0, timeout=60):
        assert report.ok, report


# GRAD-02


def _clipped(made: Program, max_norm: float) -> tuple[float, Report]:
    step = dl.train_step(made, dl.sgd(lr=0.1), clip_norm=max_norm, device="cpu")
    _, metrics = step(step.init(0), parts(made, batch_of(made, "all", 0), step.device))
    return metrics.grad_norm, _compared(made, 1)  # which clips at half the norm, and compares parameters


@pytest.mark.case("GRAD-02")
@pytest.mark.parametrize("mesh", [dl.Mesh(pp=2), dl.Mesh(pp=2, dp=2, tp=2)])
def test_one_norm_over_all_stages(mesh: dl.Mesh) -> None:
    made = program(mesh, "1f1b", layers=2, tied=True, micro_batches=2)
    found = pool(mesh.size).run(_clipped, made, 0.1, timeout=90)
    assert len({norm for norm, _ in found}) == 1
    assert all(report.ok for _, report in found), found[0][1]
