"""`dtensor-lm check --regions`: every named model is lawful in narrow; what is not is shown, and ends with 1."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dtensor_lm import models
from dtensor_lm.cli import main
from dtensor_lm.models.llama import Llama, LlamaConfig, RopeScaling
from dtensor_lm.models.narrow import narrow, sizes
from dtensor_lm.testing.workers import pool

quick = pytest.mark.quick
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The current folder; the command's variables and the folder's modules do not outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("sys.path", ["", *sys.path])
    return tmp_path


def check(capsys: Capture, *options: str) -> tuple[int, str, str]:
    code = main(["check", "--regions", *options])
    said = capsys.readouterr()
    return code, said.out, said.err


# Models by name


def half_of_the_models() -> dict[str, tuple[int, str]]:
    """On one of two workers: exit code and output by name."""
    found = {}
    for name in [*models.SHAPES][dist.get_rank() :: 2]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            found[name] = main(["check", "--regions", "--model", name, "--json"]), out.getvalue()
    return found


@pytest.fixture(scope="module")
def checked() -> dict[str, tuple[int, str]]:
    one, other = pool(2).run(half_of_the_models, timeout=110)
    return one | other


@pytest.mark.parametrize("name", models.SHAPES)
def test_every_model_is_lawful(name: str, checked: dict[str, tuple[int, str]]) -> None:
    code, out = checked[name]
    said = json.loads(out)
    assert code == 0 and said["ok"] and said["violations"] == [] and said["unchecked"] == []
    assert said["parameters"] < 1_000_000 and said["seconds"] < 100
    assert said["sizes"] == sizes(narrow(models.SHAPES[name]))
    heads = 6 if said["sizes"]["heads"] == 6 else 48  # at most 64 parts
    assert {(c["cut"], *c["parts"]) for c in said["checked"]} >= {
        ("batch", 2, 3, 6), ("seq", 2, 3, 12), ("ffn", 2, 3, 24), ("vocab", 2, 3, 48),
    }  # fmt: skip
    assert any(c["cut"] == "heads" and c["parts"][-1] in (heads, said["sizes"]["heads"]) for c in said["checked"])


@quick
def test_what_a_person_reads(capsys: Capture) -> None:
    code, out, _ = check(capsys, "--model", "llama3-8b", "--layers", "3", "--batch", "4", "--seq", "8")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("lawful: llama3-8b, narrow: 27 cuts of 8 regions, ")
    assert lines[1] == (
        "  vocab=48 embed=96 layers=3 heads=24 kv_heads=6 ffn=24 seq=8; 99,744 parameters; 4 x 8 tokens"
    )
    attention = next(line for line in lines if "(Attention)" in line)
    assert " ".join(attention.split()) == (
        "layers.0.attention (Attention) batch 2 4, heads 2 3 24, kv_heads 2 3 6, seq 2 8, heads+kv_heads 2 3 6 "
        "(and 2 like it)"
    )
    assert lines[-1] == "  hint: embed: embed is lawful too: it may be added to cuts"


def test_options_of_the_shape_are_those_of_the_narrow_model(capsys: Capture) -> None:
    _, out, _ = check(capsys, "--model", "tiny", "--tied", "true", "--z-loss", "0.1", "--layers", "1", "--json")
    tied = json.loads(out)
    _, out, _ = check(capsys, "--model", "tiny", "--layers", "1", "--json")
    assert tied["ok"] and json.loads(out)["parameters"] - tied["parameters"] == 48 * 48


@quick
def test_options_that_would_do_nothing_are_refused(capsys: Capture) -> None:
    code, out, err = check(
        capsys, "--mesh", "tp=2", "--plan", "ddp", "--zero", "1", "--no-sequence-parallel", "--dtype", "float32",
        "--micro-batches", "2", "--steps", "1",
    )  # fmt: skip
    mesh = "would do nothing: the check of regions is on, and it runs in one process, without mesh or plan"
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "error: these options cannot be used",
        f"  - mesh {mesh}",
        f"  - plan {mesh}",
        f"  - zero {mesh}",
        f"  - sequence_parallel {mesh}",
        "  - dtype would do nothing: the check of regions is on, and it computes in float64",
        "  - micro_batches would do nothing: the check of regions is on, and its batch is one",
        "  - steps would do nothing: the check of regions is on, and it trains nothing",
    ]


# Narrow shapes


@quick
def test_switches_stay_and_sizes_have_many_divisors() -> None:
    wide = models.SHAPES["llama3-405b"]
    shape = narrow(wide)
    assert shape == LlamaConfig(48, 384, 2, 96, 6, 24, seq=12, rope_scaling=RopeScaling())
    wide = LlamaConfig(9, 9, 9, 8, 8, 9, head_dim=128, tied=True, z_loss=0.5, rope_base=1e4, norm_eps=1e-3)
    assert narrow(wide, seq=20) == LlamaConfig(
        48, 24, 2, 6, 6, 24, seq=20, head_dim=4, tied=True, z_loss=0.5, rope_base=1e4, norm_eps=1e-3
    )
    for name, wide in models.SHAPES.items():
        kept = {f.name for f in fields(wide)} - {"vocab", "embed", "layers", "heads", "kv_heads", "ffn", "seq"}
        assert all(getattr(narrow(wide), n) == getattr(wide, n) for n in kept), name


@dataclass(frozen=True)
class Gated(LlamaConfig):
    """A family that nobody knew: more switches, and a size of another name."""

    gates: int = 5
    gated: bool = False


class GatedLlama(Llama):
    def __init__(self, c: Gated) -> None:
        super().__init__(c)
        assert c.gates == 5 and c.gated and c.heads == 3 * c.kv_heads


def test_any_dataclass_of_a_family(capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setitem(models.FAMILIES, Gated, GatedLlama)
    monkeypatch.setitem(models.SHAPES, "gated", Gated(99_999, 999, 99, 9, 3, 999, gated=True))  # type: ignore[arg-type]
    code, out, _ = check(capsys, "--model", "gated", "--json")
    said = json.loads(out)
    assert code == 0 and said["ok"]
    assert said["sizes"] == {
        "vocab": 48, "embed": 72, "layers": 2, "heads": 18, "kv_heads": 6, "ffn": 24, "seq": 12
    }  # fmt: skip


# What is not lawful

WRONG = """
from torch import nn
import dtensor_lm as dl

class MLP(nn.Module):
    region = dl.Region({"x": "batch embed"}, "batch embed", {"up": "ffn embed", "down": "ffn embed"}, "batch ffn")
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Parameter(dl_empty()) for _ in range(2))
    def forward(self, x):
        return (x @ self.up.t()).relu() @ self.down

def dl_empty():
    import torch
    return torch.empty(12, 4)

class Model(nn.Module):
    region = dl.Region({"x": "batch embed"}, "batch embed", cuts="batch")
    def __init__(self):
        super().__init__()
        self.mlp = MLP()
    def forward(self, x):
        return self.mlp(x)

def wide():
    return nn.Embedding(30_000_000, 1)
"""


@quick
def test_a_violation_is_shown_once_with_its_repair_and_ends_with_1(folder: Path, capsys: Capture) -> None:
    (folder / "wrong_mlp.py").write_text(WRONG)
    code, out, _ = check(capsys, "--model", "wrong_mlp:Model", "--batch", "4")
    lines = out.splitlines()
    assert code == 1 and lines[0].startswith("NOT lawful: wrong_mlp:Model: 3 cuts of 2 regions, ")
    start = lines.index("  VIOLATED mlp: ffn cut in 2 or 3 or 12 parts: add +ffn to output 0")
    tensors = ["output 0", "grad x", "grad up", "grad down"]
    assert [line.partition(" off by ")[0] for line in lines[start + 1 : start + 5]] == [f"    {t}:" for t in tensors]
    assert lines[start + 5] == "  hint: the model: embed is lawful too: it may be added to cuts"
    assert all(line.startswith("  note: parameter mlp.") for line in lines[start + 6 :])  # torch.empty has no values
    code, out, _ = check(capsys, "--model", "wrong_mlp:Model", "--json")
    said = json.loads(out)
    assert code == 1 and not said["ok"] and said["sizes"] == {}
    first: dict[str, Any] = said["violations"][0]
    assert {k: first[k] for k in ("region", "cut", "k", "tensor", "hint")} == {
        "region": "mlp", "cut": "ffn", "k": 2, "tensor": "output 0", "hint": "add +ffn to output 0",
    }  # fmt: skip
    assert first["error"] > 0.01


@quick
def test_an_error_that_is_no_number_is_null(folder: Path, capsys: Capture) -> None:
    (folder / "wrong_code.py").write_text(WRONG.replace("x @ self.up.t()", "x @ self.up.view(12, 4).t()"))
    code, out, _ = check(capsys, "--model", "wrong_code:Model", "--json")
    assert code == 1 and "Infinity" not in out
    assert {v["error"] for v in json.loads(out)["violations"] if v["tensor"] == "code"} == {None}


@quick
def test_models_that_cannot_be_checked(folder: Path, capsys: Capture) -> None:
    (folder / "wrong_size.py").write_text(WRONG)
    code, _, err = check(capsys, "--model", "wrong_size:wide")
    assert code == 2 and err == (
        "error: --model wrong_size:wide has 30,000,000 parameters, too many for a check in parts (at most 20,000,000): "
        "write a function that returns a narrow model of the same code\n"
    )
    (folder / "wrong_region.py").write_text("from torch import nn\ndef build(): return nn.Linear(2, 2)\n")
    code, _, err = check(capsys, "--model", "wrong_region:build")
    assert code == 2 and err == "error: the model itself must be a region: give its class a `region`\n"


WHOLE = """
import torch.nn.functional as F
from torch import nn
from dtensor_lm import Region
from dtensor_lm.ops import Dropout, Embedding, VocabularyLoss

class MLP(nn.Module):
    region = Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +ffn -> batch res embed",
        params={"up.weight": "ffn embed", "down.weight": "embed ffn"},
        cuts="batch seq ffn",
    )
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.drop = Dropout(0.1, "batch seq embed")
    def forward(self, x):
        return self.down(F.gelu(self.up(x)))

class Inside(MLP):
    def forward(self, x):
        return self.drop(super().forward(x))

class Odd(MLP):
    region = Region(
        inputs={"x": "batch res embed -> batch seq embd"},
        outputs="batch seq embed +ffn -> batch res embed",
        params={"up.weight": "ffn embd", "down.weight": "embed ffn"},
        cuts="batch seq ffn",
    )
    def __init__(self):
        super().__init__()
        nn.init.orthogonal_(self.up.weight)

class Model(nn.Module):
    region = Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq =",
        cuts="batch seq res seq+res",
    )
    def __init__(self, mlp=MLP):
        super().__init__()
        self.table, self.mlp, self.head = Embedding(12, 8), mlp(), VocabularyLoss(12, 8)
    def forward(self, tokens, labels=None):
        x = self.table(tokens)
        return self.head(x + self.mlp(x), labels)

class Mean(Model):
    def forward(self, tokens, labels=None):
        return super().forward(tokens, labels) / tokens.numel()

class Random(Model):
    def forward(self, tokens, labels=None):
        x = F.dropout(self.table(tokens), 0.1)
        return self.head(x + self.mlp(x), labels)

inside, odd = lambda: Model(Inside), lambda: Model(Odd)
"""


@quick
@pytest.mark.parametrize(
    "name, code, said",
    [
        ("inside", 1, "ffn cut in 2 or 16 parts: drop gets addends over ffn: call it after this region, where they are "
                      "summed"),
        ("Mean", 1, "remove batch from cuts (or is an output a mean over it? a loss is the sum over tokens)"),
        ("odd", 0, "note: the name 'embd' is known to no ready plan (did you mean embed?)"),
        ("odd", 0, "note: parameter mlp.up.weight: nn.init.orthogonal_ cannot be replayed element by element"),
        ("Random", 2, "is random, and would differ between ranks: use dtensor_lm.ops.Dropout"),
    ],
)  # fmt: skip
def test_what_newcomers_do(folder: Path, capsys: Capture, name: str, code: int, said: str) -> None:
    (folder / "newcomer.py").write_text(WHOLE)
    ended, out, err = check(capsys, "--model", f"newcomer:{name}")
    assert ended == code and said in out + err
