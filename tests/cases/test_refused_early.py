"""Plans, meshes and sizes that do not fit are refused by every command, with what would, before anything starts.

Sources: pytorch/pytorch#157182, huggingface/transformers#37893, pytorch/pytorch#122968, mosaicml/composer#3039,
pytorch/pytorch#111452, pytorch/torchtitan#27, vllm-project/vllm#52535, vipshop/cache-dit#581, pytorch/torchtitan#4258.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from case_runs import refused
from expert_models import mixture

import dtensor_lm as dl
from dtensor_lm import Mesh, Plan
from dtensor_lm.cli import main

pytestmark = pytest.mark.quick

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

# Names in a plan that match nothing (pytorch#157182, transformers#37893)

DIMS = "batch, core_heads, core_kv_heads, embed, ffn, head_dim, heads, kv_heads, kv_seq, q_seq, res, seq, vocab"
IDLE = "axis tp=2 shards nothing: give it a name in the plan, or take it off the mesh (the plan uses tp)"
FIT = "the plan does not fit this model on mesh tp=2:"


def unknown(name: str, hint: str) -> str:
    return f"compute: the model has no dimension called {name!r}{hint}; it has {DIMS}"


PLANS = {
    "a pattern": (
        "{layers.*.atn.wq: tp}",
        FIT,
        [
            unknown(
                "layers.*.atn.wq",
                ": a plan names dimensions of tensors, and layers.*.attention.wq.weight has (heads head_dim) embed",
            ),
            IDLE,
        ],
    ),
    "a pattern of modules": (
        "{layer.*: tp}",
        FIT,
        [unknown("layer.*", ": a plan names dimensions of tensors, and layers.*.mlp.up.weight has ffn embed"), IDLE],
    ),
    "a module": (
        "{mlp: tp}",
        FIT,
        [unknown("mlp", ": a plan names dimensions of tensors, and layers.*.mlp.gate.weight has ffn embed"), IDLE],
    ),
    "one right and one wrong": (
        "{ffn: tp, hedas: tp}",
        FIT,
        [unknown("hedas", " (did you mean heads or kv_heads or core_heads?)")],
    ),
    "one name twice": ("{ffn: tp, ffn: dp}", "plan p.yaml cannot be read:", ["p.yaml:1: ffn is given twice"]),
    "two names that cut one region": (
        "{ffn: tp, batch: tp}",
        FIT,
        [
            "layers.*.mlp: axis tp would cut batch and ffn of one region, and an axis serves one cut: take it off all "
            "but one (MLP may be cut by batch, ffn, seq)"
        ],
    ),
}


@pytest.mark.case("UX-01")
@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    text, title, faults = PLANS[name]
    Path("p.yaml").write_text(f"compute: {text}\n")
    for command in ("plan", "check", "train"):
        said = refused([command, "--mesh", "tp=2", "--plan", "p.yaml", "--batch", "2"], capsys, monkeypatch)
        assert said == "\n".join([f"error: {title}", *(f"  - {fault}" for fault in faults), ""])


@pytest.mark.case("UX-01")
def test_plan_lists_what_stays_whole_with_its_size(capsys: Capture, monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    path = tmp_path / "p.yaml"
    path.write_text("compute: {ffn: tp}\n")
    assert main(["plan", "--mesh", "tp=2", "--plan", str(path), "--layers", "2"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "embed.weight f32[vocab=256, embed=128] I:tp 256x128 128.0 KiB decays" in lines
    assert "layers.*.attention.wq.weight x2 f32[(heads head_dim)=128, embed=128] I:tp 128x128 64.0 KiB decays" in lines
    assert "layers.*.attention_norm.weight x2 f32[embed=128] I:tp 128 512 B" in lines
    assert "layers.*.mlp.up.weight x2 f32[ffn@tp=384/2, embed=128] 192x128 96.0 KiB decays" in lines


# Meshes and the number of processes (composer#3039, pytorch#111452)

SIZE = "a size is a whole number of at least 1 (nothing is filled in)"
STARTED = "the launcher started 4 (WORLD_SIZE): start {0} (torchrun --nproc-per-node={0}) or give a mesh whose sizes "
OF_4 = {
    "dp=3,tp=2": ["the processes do not fit the mesh", f"the mesh dp=3,tp=2 needs 6 processes, {STARTED.format(6)}"],
    "dp=2": ["the processes do not fit the mesh", f"the mesh dp=2 needs 2 processes, {STARTED.format(2)}"],
    "": ["the processes do not fit the mesh", f"the mesh needs 1 process, {STARTED.format(1)}"],
    "dp=0": ["mesh 'dp=0' cannot be used:", f"axis dp has size 0: {SIZE}"],
    "dp=-1,tp=3": ["mesh 'dp=-1,tp=3' cannot be used:", f"axis dp has size -1: {SIZE}"],
    "dp=2,tp=2,dp=2": ["mesh 'dp=2,tp=2,dp=2' cannot be used:", "axis dp is named 2 times"],
}


@pytest.mark.case("UX-02")
@pytest.mark.parametrize("mesh", OF_4)
@pytest.mark.parametrize("command", ["check", "train"])
def test_meshes_of_a_job_of_4_processes(command: str, mesh: str, capsys: Capture, monkeypatch: Patch) -> None:
    """Every rank ends with code 2 before it joins a group; the first one says why."""
    title, fault = OF_4[mesh]
    fault += "multiply to 4" if fault.endswith("sizes ") else ""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.update(WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for rank in range(4):
        os.environ["RANK"] = str(rank)
        assert main([command, "--mesh", mesh, "--batch", "6"]) == 2
        assert not dist.is_initialized() or dist.get_world_size() == 1
        expected = f"error: {title}\n  - {fault}\n" if rank == 0 else ""
        assert capsys.readouterr() == ("", expected)


@pytest.mark.case("UX-02")
@pytest.mark.parametrize("command", ["plan", "check", "train"])
def test_meshes_without_a_launcher(command: str, capsys: Capture, monkeypatch: Patch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for mesh, (title, fault) in OF_4.items():
        if title.startswith("mesh"):
            said = refused([command, "--mesh", mesh], capsys, monkeypatch)
            assert said == f"error: {title}\n  - {fault}\n"


# Sizes that must divide (vllm#52535, torchtitan#4258)

WHOLE_KV = "or leave it whole: kv_heads and core_kv_heads -> ()"
HEADS = "layers.*.attention: heads and core_heads"
KV_HEADS = "layers.*.attention: kv_heads and core_kv_heads"
HEADS_6 = [
    f"{HEADS}: 6 does not divide over tp=4 (kv_heads: 6): use heads of 4 or 8, or tp of 1 or 2",
    f"{KV_HEADS}: 6 does not divide over tp=4 (heads: 6): use kv_heads of 4 or 8, or tp of 1 or 2, {WHOLE_KV}",
]
HEADS_3 = [
    f"{HEADS}: 3 does not divide over tp=2 (kv_heads: 3): use heads of 2 or 4, or tp of 1",
    f"{KV_HEADS}: 3 does not divide over tp=2 (heads: 3): use kv_heads of 2 or 4, or tp of 1, {WHOLE_KV}",
]
FFN = "layers.*.mlp: ffn: 30 does not divide over tp=4"
FFN_30 = [f"{FFN}: use ffn of 28 or 32, or tp of 1 or 2, or leave it whole: ffn -> ()"]
BATCH_6 = ["batch: 6 sequences do not divide over dp=4: use a batch of 4 or 8"]
SIZES: dict[str, tuple[dict[str, int], str, list[str], list[str]]] = {
    "6 heads": (dict(heads=6, kv_heads=6, head_dim=16), "tp=4", [], HEADS_6),
    "3 heads": (dict(heads=3, kv_heads=3, head_dim=16), "tp=2", [], HEADS_3),
    "ffn of 30": (dict(ffn=30), "tp=4", [], FFN_30),
    "batch of 6": ({}, "dp=4", ["--batch", "6"], BATCH_6),
    "6 heads and ffn of 30": (dict(heads=6, kv_heads=6, head_dim=16, ffn=30), "tp=4", [], HEADS_6 + FFN_30),
    "batch of 6 and 6 heads": (
        dict(heads=6, kv_heads=6, head_dim=16), "dp=4,tp=4", ["--batch", "6"], BATCH_6 + HEADS_6,
    ),
    "batch of 6 and ffn of 30": (dict(ffn=30), "dp=4,tp=4", ["--batch", "6"], BATCH_6 + FFN_30),
}  # fmt: skip


@pytest.mark.case("UX-04")
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, capsys: Capture, monkeypatch: Patch) -> None:
    changes, mesh, options, faults = SIZES[name]
    shape: Any = replace(dl.models.SHAPES["tiny"], layers=2, **changes)
    monkeypatch.setitem(dl.models.SHAPES, "shaped", shape)
    for command in ("plan", "check"):
        said = refused([command, "--model", "shaped", "--mesh", mesh, *options], capsys, monkeypatch)
        lines = [f"error: the plan does not fit this model on mesh {mesh}:", *(f"  - {fault}" for fault in faults)]
        assert said == "\n".join(lines) + "\n"


@pytest.mark.case("UX-04")
def test_experts() -> None:
    """3 experts on an axis of 2, by a plan that gives the axis that meaning; and with another fault."""
    experts = "experts: expert: 3 does not divide over ep=2: use expert of 2 or 4, or ep of 1 or 3, or leave it whole: "
    with pytest.raises(dl.PlanError) as error:
        dl.resolve(mixture(3), Plan({"expert": "ep"}), Mesh(ep=2), batch=2, seq=8)
    assert error.value.faults == (f"{experts}expert -> ()",)
    with pytest.raises(dl.PlanError) as error:
        dl.resolve(mixture(3), Plan({"expert": "ep", "batch": "dp"}), Mesh(dp=4, ep=2), batch=6, seq=8)
    assert error.value.faults == (BATCH_6[0], f"{experts}expert -> ()")
