"""Parameters and branches that the loss does not depend on: their backward's collectives are not predicted, since none
happen."""

from __future__ import annotations

import pytest
import torch
from tests_models import MLP, Loss, Table
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm.sharding_plans import Plan
from dtensor_lm.testing.local import assert_equivalent

TP = {"ffn": "tp", "vocab": "tp", "res": "tp"}


class Layer(nn.Module):
    """A branch that counts, a branch whose result is thrown away, a parameter that is never used."""

    region = dl.Region(
        inputs={"x": "batch res embed"}, outputs=("batch res embed",) * 2, params={"spare": "embed"}, cuts="batch res"
    )

    def __init__(self) -> None:
        super().__init__()
        self.used, self.wasted, self.spare = MLP(8, 16), MLP(8, 16), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.used(x), self.wasted(x)


class Wasteful(nn.Module):
    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq",
        cuts="batch seq res seq+res",
    )

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers, self.idle = Table(12, 8), nn.ModuleList(Layer() for _ in range(3)), MLP(8, 16)
        self.loss = Loss()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x, thrown = layer(x)
        self.idle(thrown)
        return self.loss(x, labels)


@pytest.mark.parametrize(
    "mesh, plan",
    [
        ("tp=2", Plan(TP)),
        ("fsdp=2", Plan({"batch": "fsdp"}, {"embed": "fsdp"})),
        ("fsdp=2,tp=2", Plan({**TP, "batch": "fsdp"}, {"embed": "fsdp"})),
        ("dp=2", Plan({"batch": "dp"}, gradients={"ffn": "dp"}, optimizer={"ffn": "dp"})),
    ],
    ids=["tp", "fsdp", "both", "zero2"],
)
def test_equal_to_one_device_with_what_the_program_predicts(mesh: str, plan: Plan) -> None:
    report = assert_equivalent(
        dl.abstract(Wasteful), plan, dl.Mesh.parse(mesh), batch=4, seq=6, micro_batches=2, steps=2
    )
    assert report.collectives_match


@pytest.mark.quick
def test_what_a_gradient_reaches() -> None:
    program = dl.resolve(dl.abstract(Wasteful), Plan({**TP, "batch": "fsdp"}, {"embed": "fsdp"}),
                         dl.Mesh(fsdp=2, tp=2), batch=4, seq=6)  # fmt: skip
    for layer in range(3):  # also of layers that were not run themselves
        edges = {e.tensor: e.grad for e in program.edges if e.region == f"layers.{layer}.used" and e.steps}
        assert edges and all(edges.values())
        edges = {e.tensor: e.grad for e in program.edges if e.region == f"layers.{layer}.wasted" and e.steps}
        assert edges and not any(edges.values())
    gathers = {g.unit: g.backward for g in program.gathers}
    assert gathers["layers.2"] and not gathers["idle"]
