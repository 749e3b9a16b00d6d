"""Plans that nobody ships: the algebra has to hold for them too."""

from __future__ import annotations

import pytest

import dtensor_lm as dl
from dtensor_lm.sharding_plans import Plan
from dtensor_lm.testing.equivalence import Report, compare
from dtensor_lm.testing.workers import pool

TP = {"heads": "tp", "kv_heads": "tp", "core_heads": "tp", "core_kv_heads": "tp", "ffn": "tp", "vocab": "tp"}
PLANS: dict[str, tuple[str, Plan]] = {
    "kv heads whole": ("tp=2", Plan({"heads": "tp", "core_heads": "tp", "ffn": "tp", "vocab": "tp", "res": "tp"})),
    "kv heads over one of two axes": (
        "a=2,b=2",
        Plan(
            {
                "heads": ("a", "b"),
                "core_heads": ("a", "b"),
                "kv_heads": "a",
                "core_kv_heads": "a",
                "ffn": ("a", "b"),
                "vocab": ("b", "a"),
                "res": ("a", "b"),
            }
        ),
    ),
    "vocabulary whole, sequence parallel": ("tp=2", Plan({**TP, "vocab": (), "res": "tp"})),
    "only the vocabulary": ("tp=2", Plan({"vocab": "tp"})),
    "only the residual stream": ("tp=2", Plan({"res": "tp"})),
    "feed-forward over another axis than heads": (
        "a=2,b=2",
        Plan({"heads": "a", "core_heads": "a", "kv_heads": "a", "core_kv_heads": "a", "ffn": "b", "res": ("b", "a")}),
    ),
    "sequence of bodies cut, core whole": ("cp=2", Plan({"seq": "cp", "res": "cp"})),
    "heads whole in the body, cut in the core": ("tp=2", Plan({"core_heads": "tp", "core_kv_heads": "tp"})),
    "heads cut in the body, whole in the core": ("tp=2", Plan({"heads": "tp", "kv_heads": "tp"})),
    "sequence in the body to heads in the core": (
        "cp=2",
        Plan({"seq": "cp", "res": "cp", "core_heads": "cp", "core_kv_heads": "cp"}),
    ),
    "gradients less cut than storage": ("fsdp=2", Plan({"batch": "fsdp"}, {"embed": "fsdp"}, {"embed": ()}, {})),
    "gradients more cut than storage": (
        "dp=2,fsdp=2",
        Plan({"batch": ("dp", "fsdp")}, {"embed": "fsdp"}, {"embed": ("fsdp", "dp")}, {"embed": ("fsdp", "dp")}),
    ),
    "storage of rows, uneven": ("fsdp=3", Plan({"batch": "fsdp"}, {"ffn": "fsdp", "heads": "fsdp", "vocab": "fsdp"})),
    "storage over an axis that computes nothing": ("s=2", Plan({}, {"embed": "s"})),
    "optimizer over two dims": (
        "dp=2,fsdp=2",
        Plan({"batch": ("dp", "fsdp")}, {}, {}, {"embed": "dp", "ffn": "fsdp", "heads": "fsdp", "kv_heads": "fsdp"}),
    ),
    "weights stay gathered": ("dp=2", Plan({"batch": "dp"}, {"embed": "dp"}, regather=False)),
    "tensor parallel storage cut further": ("tp=2,fsdp=2", Plan({**TP, "batch": "fsdp"}, {"ffn": ("tp", "fsdp")})),
}


def run(name: str, tied: bool) -> Report:
    mesh, plan = PLANS[name]
    model = dl.models.build("tiny", layers=1, tied=tied, seq=24, vocab=64, embed=32, ffn=64)
    ranks = dl.Mesh.parse(mesh).size
    program = dl.resolve(model, plan, dl.Mesh.parse(mesh), batch=2 * ranks, seq=24, micro_batches=2, dtype="float64")
    return compare(program, steps=2)


TIED = {"vocabulary whole, sequence parallel", "only the vocabulary", "gradients less cut than storage",
        "storage of rows, uneven", "kv heads over one of two axes"}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_equal_to_one_device(name: str) -> None:
    tied = name in TIED
    for report in pool(dl.Mesh.parse(PLANS[name][0]).size).run(run, name, tied):
        assert report.ok, report
