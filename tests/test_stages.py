"""Where a model is cut into stages, and what is said where it cannot be."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtensor_lm as dl
from dtensor_lm import schedules
from dtensor_lm.chain import balance, layer_of
from dtensor_lm.sharding_plans.parts import part, rank_program, stage_program
from dtensor_lm.testing.case import batch_of
from dtensor_lm.testing.equivalence import Report, compare
from dtensor_lm.testing.workers import pool

pytestmark = pytest.mark.quick


def resolved(model: nn.Module, mesh: dl.Mesh, **more: Any) -> dl.Program:
    return dl.resolve(model, dl.plans.standard(), mesh, seq=8, dtype="float64", **more)


def faults(model: nn.Module, mesh: dl.Mesh, **more: Any) -> list[str]:
    with pytest.raises(dl.PlanError) as error:
        resolved(model, mesh, **more)
    return list(error.value.faults)


def tiny(layers: int = 4, **changes: Any) -> nn.Module:
    return dl.models.build("tiny", layers=layers, vocab=32, embed=16, heads=2, kv_heads=2, ffn=16, **changes)


# Costs


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8), st.integers(1, 8))
def test_balance_is_the_best_of_all(items: list[tuple[int, bool]], parts: int) -> None:
    costs, allowed = [float(c) for c, _ in items], [a for _, a in items]
    best: tuple[float, float] | None = None
    for cuts in itertools.combinations(range(1, len(costs)), parts - 1):
        if all(allowed[c] for c in cuts):
            sums = [sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)])]
            found = (max(sums), sum(s * s for s in sums))
            best = min(best or found, found)
    counts = balance(costs, allowed, parts)
    if best is None:
        assert counts is None
    else:
        assert counts is not None and len(counts) == parts and min(counts) >= 1 and sum(counts) == len(costs)
        starts = [0, *itertools.accumulate(counts)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(starts)]
        assert all(allowed[s] for s in starts[1:-1]) and max(sums) == best[0]


def test_layers_are_counted_by_the_first_number_of_a_path() -> None:
    assert [layer_of(u) for u in ("embed", "layers.3", "blocks.12.attention", "a.1.2")] == [
        "", "layers.3", "blocks.12", "a.1",
    ]  # fmt: skip


@pytest.mark.case("PP-04")
@pytest.mark.parametrize("layers, mesh, virtual", [(3, dl.Mesh(pp=2), 1), (5, dl.Mesh(pp=4), 1), (7, dl.Mesh(pp=2), 2),
                                                   (7, dl.Mesh(pp=3), 1), (13, dl.Mesh(pp=3), 3)])  # fmt: skip
def test_every_layer_is_on_one_stage(layers: int, mesh: dl.Mesh, virtual: int) -> None:
    program = resolved(tiny(layers), mesh, virtual_stages=virtual, micro_batches=2 * mesh["pp"])
    pipe = program.pipeline
    assert pipe is not None
    units = [link.unit for stage in pipe.stages for link in pipe.links[stage.first : stage.stop]]
    assert units == ["embed", *(f"layers.{i}" for i in range(layers)), "head"]
    assert all(stage.layers >= 1 for stage in pipe.stages) and sum(s.layers for s in pipe.stages) == layers
    held = [n for rank in range(mesh["pp"]) for n in rank_program(program, rank).parameters]
    assert sorted(held) == sorted(program.parameters)  # each once


def test_the_head_and_the_embedding_count_as_they_cost() -> None:
    """A vocabulary as dear as three layers leaves the last stage three layers less."""
    wide = dl.models.build("tiny", layers=9, vocab=1024, embed=64, heads=2, kv_heads=2, ffn=64)
    pipe = resolved(wide, dl.Mesh(pp=2)).pipeline
    assert pipe is not None
    first, last = pipe.stages
    head = pipe.links[-1].cost / pipe.links[2].cost
    assert head > 2 and first.layers - last.layers in (round(head), round(head) + 1, round(head) - 1)
    assert max(first.cost, last.cost) < 0.62 * (first.cost + last.cost)


# What does not fit


@pytest.mark.case("PP-04")
def test_a_stage_without_a_layer_is_refused() -> None:
    more = "every stage needs a layer: use at least {} layers, or fewer stages"
    assert faults(tiny(1), dl.Mesh(pp=2)) == ["1 layer on 2 stages: " + more.format(2)]
    assert faults(tiny(2), dl.Mesh(pp=4)) == ["2 layers on 4 stages: " + more.format(4)]
    assert faults(tiny(3), dl.Mesh(pp=2), virtual_stages=2) == ["3 layers on 4 stages: " + more.format(4)]


@pytest.mark.parametrize("split", [[3, 2], [4], [4, 0], [2, 1, 1]])
def test_a_split_that_is_none(split: list[int]) -> None:
    said = f"split {','.join(map(str, split))}: 2 numbers of at least 1 are needed, one for each stage, which add up "
    assert faults(tiny(4), dl.Mesh(pp=2), split=split) == [said + "to the model's 4 layers"]


@pytest.mark.case("PP-05")
def test_micro_batches_that_do_not_fit() -> None:
    assert faults(tiny(), dl.Mesh(pp=2), batch=8, micro_batches=3) == [
        "batch: 8 sequences in 3 micro-batches do not divide: use a batch of 6 or 9"
    ]
    assert faults(tiny(), dl.Mesh(pp=2), batch=2, micro_batches=4) == [
        "batch: 2 sequences in 4 micro-batches do not divide: use a batch of 4"
    ]
    assert faults(tiny(), dl.Mesh(pp=2), micro_batches=5, accumulate=2) == [
        "5 micro-batches do not divide over accumulate=2 runs of the schedule: use 4 or 6"
    ]
    with pytest.raises(dl.UserError, match=r"batch is 0: a whole number of at least 1"):
        resolved(tiny(), dl.Mesh(pp=2), batch=0)


LIMITS = [
    ("interleaved-1f1b", 2, 5, "schedule interleaved-1f1b: 5 micro-batches: with 2 ranks they go in 2 rounds, and 5 is "
                               "not a multiple of 2; use 4 or 6"),
    ("dualpipe-v", 2, 3, "schedule dualpipe-v: 3 micro-batches: dualpipe-v needs at least as many as it has stages, "
                         "use 4 or more"),
    ("dualpipe-v", 1, 4, "schedule dualpipe-v: 1 virtual stages: dualpipe-v has 2 per rank, use 2"),
    ("zb-v", 3, 4, "schedule zb-v: 3 virtual stages: zb-v has 2 per rank, use 2"),
    ("1f1b", 2, 4, "schedule 1f1b: 2 virtual stages: 1f1b has 1 per rank, use 1"),
]  # fmt: skip


@pytest.mark.parametrize("schedule, virtual, micro, fault", LIMITS)
def test_limits_of_schedules(schedule: str, virtual: int, micro: int, fault: str) -> None:
    plan = dl.plans.standard(whole_gradients=True)
    with pytest.raises(dl.PlanError) as error:
        dl.resolve(tiny(6), plan, dl.Mesh(pp=2), seq=8, micro_batches=micro, schedule=schedule, virtual_stages=virtual)
    assert list(error.value.faults) == [fault]


def test_gradients_that_are_cut_while_a_backward_is_split() -> None:
    said = faults(tiny(), dl.Mesh(pp=2, fsdp=2), schedule="zb-v")
    assert said == [
        "schedule zb-v splits backward in two halves, and gradients are reduced after the last of them, so fsdp cannot "
        "cut them before: in the plan's table gradients give names the axes that they have in compute (in most plans "
        "embed -> ())"
    ]
    whole = dl.plans.standard(whole_gradients=True)
    dl.resolve(tiny(), whole, dl.Mesh(pp=2, fsdp=2), seq=8, schedule="zb-v")
    with pytest.raises(dl.PlanError, match="zero is 2, which shards gradients"):
        dl.plans.standard(2, whole_gradients=True)


def test_a_pipelines_options_without_a_pipeline() -> None:
    said = faults(tiny(), dl.Mesh(dp=2), schedule="1f1b", split=[2, 2], accumulate=2, virtual_stages=2)
    assert said == [
        f"{name} is of a pipeline: give the mesh an axis for layers, such as pp=2, or leave it out"
        for name in ("schedule", "virtual_stages", "split", "accumulate")
    ]


def test_a_plan_that_sends_more_than_layers_to_the_axis() -> None:
    plan = dl.Plan({"layers": ("pp", "tp"), "batch": ("dp", "pp")}, storage={"layers": "dp"})
    with pytest.raises(dl.PlanError) as error:
        dl.resolve(tiny(), plan, dl.Mesh(pp=2, tp=2, dp=2), seq=8)
    assert set(error.value.faults) >= {
        "layers -> (pp, tp): one axis is a pipeline's: layers -> pp",
        "compute: batch -> pp: the layers go over this axis, and nothing else can: take it off",
        "storage: layers: layers go over a pipeline in compute, and only there: take it out",
    }


def test_a_table_that_cannot_be_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    good = schedules.generate("1f1b", 2, 4)
    path.write_text(schedules.to_csv(good).replace("0F3", "   "))
    assert faults(tiny(), dl.Mesh(pp=2), schedule=schedules.read(str(path))) == [
        "schedule mine: 0F3 is missing: add it to rank 0"
    ]
    assert faults(tiny(), dl.Mesh(pp=4), schedule=good, micro_batches=8) == [
        "schedule 1f1b: its table has 2 ranks, the mesh's pipeline 4",
        "schedule 1f1b: its table has 4 micro-batches, a run of the schedule 8: use 4 micro-batches",
    ]
    forwards = schedules.evaluation(good.placement, 4)
    assert faults(tiny(), dl.Mesh(pp=2), schedule=forwards) == [
        "schedule evaluation: its table has no backward: it is an evaluation"
    ]
    assert resolved(tiny(), dl.Mesh(pp=2), schedule=good).micro_batches == 4


# Models that can be cut, and that cannot


class Layer(nn.Module):
    region = dl.Region({"x": "batch seq embed"}, "batch seq embed", {"w": "embed"}, cuts="batch seq embed")

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.w)


class Gated(nn.Module):
    """Takes a second tensor, and integers."""

    region = dl.Region(
        {"x": "batch seq embed", "gate": "embed", "ids": "int batch seq"}, ("batch seq embed", "embed"),
        {"w": "embed"}, cuts="batch seq embed",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor, gate: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.w + gate + ids.unsqueeze(-1) * 0.1, gate * 1.5


class Added(nn.Module):
    """Adds two parameters, whose gradients autograd makes one tensor; with `alone` it gives one of them away."""

    region = dl.Region({"x": "batch seq embed"}, ("batch seq embed", "embed"), {"w": "embed", "b": "embed"},
                       cuts="batch seq embed")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = (nn.Parameter(torch.empty(8)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + (self.w + self.b), self.w * 2


class Table(nn.Module):
    region = dl.Region({"ids": "int batch seq"}, "batch seq embed", {"weight": "vocab embed"}, cuts="batch seq embed")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(16, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class Loss(nn.Module):
    region = dl.Region(
        {"x": "batch seq embed", "labels": "int batch seq"}, "+batch +seq +embed", cuts="batch seq embed"
    )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (x.square() * (labels != -100).unsqueeze(-1)).sum()


class Model(nn.Module):
    """One that does something between its layers, as `kind` says."""

    region = dl.Region(
        {"tokens": "int batch seq", "labels": "int batch seq"}, "+batch +seq +embed",
        {"scale": "embed", "last": "embed"}, cuts="batch seq embed",
    )  # fmt: skip

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.loss = Table(), Loss()
        kinds = {"tuples": Gated, "added": Added, "alone": Added}
        self.layers = nn.ModuleList(kinds.get(kind, Layer)() for _ in range(4))
        self.scale, self.last = (nn.Parameter(torch.empty(8)) for _ in range(2))
        for p in self.parameters():
            nn.init.normal_(p, 0.5, 0.1)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        start, kept, total = x, x, 0.0
        gate = self.scale.exp()
        for i, layer in enumerate(self.layers):
            if self.kind == "tuples":
                x, gate = layer(x, gate, tokens)
            elif self.kind in ("added", "alone"):
                x, other = layer(x)
                x = x * other if self.kind == "alone" else x
            elif self.kind == "computed again":
                x = checkpoint(layer, x, use_reentrant=False) * 1.5
            elif self.kind == "in place":
                x = layer(x)
                x.mul_(0.5)
                x += 1
            elif self.kind == "border":
                x = layer(x) * self.last if i == 1 else layer(x)
            elif self.kind == "cut off":
                x = layer(x).detach() if i == 1 else layer(x)
            elif self.kind == "residual":
                x = x + layer(x)
            elif self.kind == "skip":
                x = layer(x) + (start if i == 3 else 0)
            elif self.kind == "sum":
                x = layer(x)
                total = total + x.square().mean(-1, keepdim=True)
            elif self.kind == "detached":
                x = layer(x)
                kept = kept.detach() + 1 if i == 2 else x
                x = x + kept * 0.5 if i == 2 else x
            else:
                x = layer(x) * self.scale  # between all layers: on every stage
        return self.loss(x if self.kind == "border" else x * self.last + total, labels)


def build(kind: str) -> nn.Module:
    return dl.abstract(lambda: Model(kind))


@pytest.mark.parametrize("kind, boundary, shared", [("scaled", ["x"], ["scale"]), ("tuples", ["x", "gate"], [])])
def test_the_models_own_code_runs_once(kind: str, boundary: list[str], shared: list[str]) -> None:
    pipe = resolved(build(kind), dl.Mesh(pp=2)).pipeline
    assert pipe is not None
    assert [b.tensor for b in pipe.boundaries] == boundary
    assert [n for names in pipe.shared().values() for n in names] == shared
    assert pipe.ranks_of("last") == (1,) and pipe.ranks_of("embed.weight") == (0,)


def _run(kind: str, mesh: dl.Mesh, schedule: str, virtual: int) -> Report:
    plan = dl.plans.standard(whole_gradients=schedule == "zb-v")
    made = dl.resolve(build(kind), plan, mesh, seq=8, dtype="float64", schedule=schedule, virtual_stages=virtual)
    return compare(made, steps=2, batches=[batch_of(made, "some", i) for i in range(2)])


def test_own_code_between_stages_is_of_the_first() -> None:
    pipe = resolved(build("border"), dl.Mesh(pp=2), split=[2, 2]).pipeline
    assert pipe is not None and pipe.ranks_of("last") == (0,)


STAGES = [
    *(pytest.param(kind, dl.Mesh(pp=2), "zb-v", 2) for kind in ("added", "computed again", "in place")),
    *(pytest.param(kind, dl.Mesh(pp=2, fsdp=2), "interleaved-1f1b", 2) for kind in ("scaled", "tuples", "in place")),
    *(pytest.param(kind, dl.Mesh(pp=4), "1f1b", 1) for kind in ("scaled", "tuples", "computed again", "cut off")),
    *(pytest.param(kind, dl.Mesh(pp=2), "1f1b", 1) for kind in ("alone", "border")),
]


@pytest.mark.parametrize("kind, mesh, schedule, virtual", STAGES)
def test_such_models_equal_one_device(kind: str, mesh: dl.Mesh, schedule: str, virtual: int) -> None:
    for report in pool(mesh.size).run(_run, kind, mesh, schedule, virtual, timeout=60):
        assert report.ok, report


REPAIR = ": hand everything that later layers need from layer to layer"


@pytest.mark.parametrize(
    "kind, split, fault",
    [
        ("residual", [1, 3], "no stage can begin with layers.1: the model's own code uses what layers.0 gave"),
        ("skip", [2, 2], "no stage can begin with layers.2: the model's own code uses what embed gave"),
        ("sum", [2, 2], "no stage can begin with layers.2: the model's own code uses what layers.1 gave"),
        ("detached", [2, 2], "no stage can begin with layers.2: the model's own code uses what layers.1 gave"),
    ],
)
def test_what_passes_by_a_stage_is_refused(kind: str, split: list[int], fault: str) -> None:
    """Also where no gradient shows it."""
    (said,) = faults(build(kind), dl.Mesh(pp=2), split=split)
    assert said.endswith(REPAIR) and said.startswith("no stage can begin with layers."), said
    if kind != "residual":
        assert said == fault + REPAIR, said


HALVES = [
    ("scaled", "zb-h1", "scale (stage 1) is used more than once in a stage"),
    ("alone", "zb-h1", "layers.2.w (stage 1), layers.3.w (stage 1) is used more than once in a stage"),
    ("cut off", "zb-h1", ""),
    ("tuples", "zb-v", ""),
]


@pytest.mark.parametrize("kind, schedule, fault", HALVES)
def test_a_backward_that_cannot_be_split(kind: str, schedule: str, fault: str) -> None:
    """Torch would lose gradients, double them, or fail in the middle."""
    if not fault:
        resolved(build(kind), dl.Mesh(pp=2), schedule=schedule)
        return
    assert faults(build(kind), dl.Mesh(pp=2), schedule=schedule, split=[2, 2]) == [
        f"schedule {schedule} splits backward in two halves, and the second, of parameters, cannot be computed: "
        f"{fault}: use a schedule that does not split, such as 1f1b or interleaved-1f1b"
    ]


def test_a_cut_is_made_where_it_can_be() -> None:
    """What skips layers 0 to 2 leaves one place."""
    pipe = resolved(build("detached"), dl.Mesh(pp=2)).pipeline
    assert pipe is not None and [stage.layers for stage in pipe.stages] in ([1, 3], [3, 1])


# The Program of a part


def test_parts_of_a_program() -> None:
    program = resolved(tiny(4, tied=True), dl.Mesh(pp=2, fsdp=2, tp=2), schedule="interleaved-1f1b", virtual_stages=2)
    pipe = program.pipeline
    assert pipe is not None and program.mesh.size == 8
    assert program.parameters["embed.weight"].storage.mesh.sizes == {"fsdp": 2, "tp": 2}
    assert pipe.shared() == {(0, 1): ["embed.weight"]}
    assert program.home("embed.weight", 0) and not program.home("embed.weight", 7)
    for rank in range(8):
        mine = part(program, rank)
        assert mine.held == ((0, 2), (1, 3))[rank // 4]
        assert mine.collectives == program.by_rank[rank // 4]
        sent = [c for c in mine.collectives if c.op == "send"]
        size = math.prod(pipe.boundaries[0].layout.local_shape()) * 8
        assert all(c.bytes == size for c in sent[:-1]) and sent[-1].where == "gradients of shared parameters"
    stage = stage_program(program, 2)
    assert {r.unit for r in stage.regions.values()} == {"", "layers.2"}
    assert set(stage.parameters) == {n for n in program.parameters if n.startswith("layers.2.")}
    text = str(program)
    assert "pipeline over pp: interleaved-1f1b, 4 stages on 2 ranks, 4 micro-batches" in text
    assert "embed.weight is on pp ranks 0, 1: its gradients are added" in text
    assert "collectives per rank and step, pp rank 1" in text
    shown = program.as_dict()["pipeline"]
    assert isinstance(shown, dict) and [b["bytes"] for b in shown["boundaries"]] == [size] * 3


def test_a_mesh_without_an_axis_keeps_the_numbers_of_ranks() -> None:
    mesh = dl.Mesh(tp=2, pp=3, dp=2)
    inner = mesh.without("pp")
    assert inner.size == 4 and inner.sizes == {"tp": 2, "dp": 2} and inner.whole is mesh
    for rank in range(12):
        place = mesh.coordinate(rank)
        assert inner.coordinate(rank) == {"tp": place["tp"], "dp": place["dp"]}
        assert inner.group(("dp", "tp"), rank) == mesh.group(("dp", "tp"), rank)
        assert {mesh.coordinate(r)["pp"] for r in inner.group(("tp", "dp"), rank)} == {place["pp"]}
    assert inner != dl.Mesh(tp=2, dp=2) and mesh.without("cp") is mesh
    with pytest.raises(dl.MeshError, match="12 ranks but 4 processes"):
        inner.check_world(4)
