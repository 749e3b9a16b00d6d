"""A model that knows nothing of this package: few lines of names, the same function, any mesh; and what one can get
wrong when one names its place."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_docs import blocks

import dtensor_lm as dl
from dtensor_lm.cli import main
from dtensor_lm.initial_values import recipes
from dtensor_lm.models.own import own
from dtensor_lm.testing import check_regions
from dtensor_lm.testing.workers import pool

ROOT = Path(__file__).parent.parent
EXPERIMENT = ROOT / "experiments" / "bring_your_own"
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """An empty current folder; modules that are found in it are forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith((str(tmp_path), str(EXPERIMENT))):
            del sys.modules[name]


@pytest.fixture
def three(monkeypatch: Patch) -> tuple[ModuleType, ModuleType, ModuleType]:
    """plain, named, run."""
    monkeypatch.syspath_prepend(str(EXPERIMENT))
    import named
    import plain
    import run

    return plain, named, run


# The experiment


@pytest.mark.quick
def test_names_are_few_lines(three: tuple[ModuleType, ...]) -> None:
    lines, added, removed = three[2].changed_lines()
    assert (added, removed) == (38, 11) and lines == 56


@pytest.mark.quick
def test_names_change_nothing(three: tuple[ModuleType, ...]) -> None:
    """The same parameters by name, the same logits; and the sum of the loss is the mean times the tokens."""
    torch.manual_seed(0)
    ordinary, named = (module.LanguageModel(vocab=48, width=24, seq=16).double() for module in three[:2])
    named.load_state_dict(ordinary.state_dict())
    tokens, labels = torch.randint(0, 48, (2, 3, 16)).unbind()
    labels[0, 3:9] = -100
    torch.testing.assert_close(named(tokens), ordinary(tokens), rtol=1e-12, atol=0)
    total = ordinary(tokens, labels) * (labels != -100).sum()
    torch.testing.assert_close(named(tokens, labels), total, rtol=1e-12, atol=0)


@pytest.mark.quick
def test_it_obeys_the_law(three: tuple[ModuleType, ...]) -> None:
    report = check_regions(dl.abstract(lambda: three[1].LanguageModel(vocab=48, width=24)))
    assert report.ok and not report.unchecked, str(report)


def test_losses_of_three_meshes_agree(three: tuple[ModuleType, ...], folder: Path) -> None:
    run = three[2]
    found = [run.losses(mesh, folder / str(i), 6, 4, 16) for i, mesh in enumerate(run.MESHES)]
    assert len(found) == 3 and len(found[0]) == 6 and found[0][-1] < found[0][0]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=run.TOLERANCE, abs=0)


# Its place

MODEL = (EXPERIMENT / "named.py").read_text()
MORE = """
BUILT = None
SIZES = {"width": 24}
def build(layers=1, label_smoothing=0.0):
    model = LanguageModel(vocab=256, width=24, heads=2, layers=layers)
    model.smoothing = label_smoothing
    return model
def inside():
    import dtensor_lm as dl
    def one():
        model = LanguageModel(width=24, heads=2)
        nn.init.trunc_normal_(model.head.weight, std=0.5)
        return model
    return dl.abstract(one)
def outside():
    model = LanguageModel(width=24, heads=2)
    nn.init.trunc_normal_(model.head.weight, std=0.5)
    return model
def several(width, *, heads, **more): return LanguageModel()
def anything(**more): return LanguageModel(**more)
def nothing(): LanguageModel()
def text(): return "a model"
def fails(): raise RuntimeError("not today\\nsecond line")
def leaves(): raise SystemExit(3)
def deep(): return nn.Linear("4", 2)
def signed(): return Region({"x": "batch ("}, "+")
def small(): return LanguageModel(vocab=100, width=24, heads=2)
class Needy(LanguageModel):
    def forward(self, tokens, labels, index=None): return super().forward(tokens, labels, index)
def needy(): return Needy(width=24, heads=2)
class Nameless(nn.Module):
    region = Region({"tokens": "int batch seq", "labels": "int batch seq"}, "+batch +seq =",
                    {"table.weight": "rows embed"}, "batch seq")
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 2)
    def forward(self, tokens, labels): return self.table(tokens).sum()
class Other(nn.Module):
    region = Region({"ids": "int batch seq"}, ("batch seq", "batch seq"), cuts="batch")
    def __init__(self):
        super().__init__()
        self.table = Embedding(256, 2)
    def forward(self, ids):
        x = self.table(ids).sum(-1)
        return x, x
"""


def said(place: str, capsys: Capture, *options: str, command: str = "plan") -> str:
    """The message of a command that is refused."""
    assert main([command, "--model", place, *options]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    return found.err.removeprefix("error: ").rstrip("\n")


def line(text: str) -> int:
    """Where a text stands in the module."""
    return next(i for i, each in enumerate((MODEL + MORE).splitlines(), 1) if text in each)


@pytest.mark.quick
def test_what_is_wrong_with_the_place(folder: Path, capsys: Capture) -> None:
    for name in ("mine_a", "broken_syntax", "broken_import", "broken_value"):
        (folder / f"{name}.py").write_text(MODEL + MORE)
    (folder / "pack").mkdir()
    (folder / "pack" / "mine_y.py").touch()
    (folder / "broken_syntax.py").write_text("a = 1\ndef build(:\n")
    (folder / "broken_import.py").write_text("import not_installed_at_all\n")
    (folder / "broken_value.py").write_text("\nx = 1 / 0\n")
    have = (
        "it has Attention, MLP, Block, LanguageModel, build, inside, outside, several, anything, nothing, text, fails"
    )
    written = "a model of your own is written package.module:function"
    messages = {
        "mine_b:build": f"no module is called 'mine_b' (did you mean mine_a?): it must be in the folder {folder}, or "
        "installed",
        "mine_a.deeper:build": "mine_a is a module, and holds no other",
        "pack.mine_x:build": "no module is called 'pack.mine_x' (did you mean pack.mine_y?): it must be in the folder "
        f"{folder}, or installed",
        "mine_a:bild": f"mine_a has no 'bild' (did you mean build?); {have}, ",
        "mine_a:": f"mine_a needs a function after the ':'; {have}, ",
        ":build": written,
        "mine a:build": written,
        "mine_a:build:more": written,
        "./mine_a.py:build": "name the module, not its file: mine_a:build",
        "mine_a:BUILT": "BUILT is a NoneType, not a function",
        "mine_a:SIZES": "SIZES is a dict, not a function",
        "mine_a:nothing": "nothing returns None, not an nn.Module: does it end without `return`?",
        "mine_a:text": "text returns a str, not an nn.Module: return the model",
        "mine_a:fails": f"fails raised RuntimeError: not today (mine_a.py:{line('def fails')})",
        "mine_a:leaves": f"leaves raised SystemExit: 3 (mine_a.py:{line('def leaves')})",
        "mine_a:deep": "deep raised TypeError: ",
        "mine_a:signed": f"signed (mine_a.py:{line('def signed')}): a region's signature cannot be read:\n"
        "  - input x: 'batch (': cannot read '('",
        "broken_syntax:build": "import broken_syntax raised SyntaxError: invalid syntax (broken_syntax.py:2)",
        "broken_import:build": "import broken_import raised ModuleNotFoundError: No module named "
        "'not_installed_at_all' (broken_import.py:1)",
        "broken_value:build": "import broken_value raised ZeroDivisionError: division by zero (broken_value.py:2)",
    }
    for place, message in messages.items():
        assert said(place, capsys).startswith(f"--model {place}: {message}"), place
    assert said("mine_a:deep", capsys).endswith(f" (mine_a.py:{line('def deep')})")
    assert said("mine_a:several", capsys) == (
        "--model mine_a:several cannot be called:\n"
        "  - several needs width, heads: nothing gives it; give the function defaults for them"
    )
    assert "; or one of your own: package.module:function" in said("mine_a", capsys)


@pytest.mark.quick
def test_options_reach_the_function_or_are_refused(folder: Path, capsys: Capture) -> None:
    (folder / "mine_o.py").write_text(MODEL + MORE)
    assert main(["plan", "--model", "mine_o:build", "--layers", "3", "--seq", "8", "--label-smoothing", "0.5"]) == 0
    assert "blocks.*.mlp.up.weight x3" in capsys.readouterr().out
    model = own("mine_o:build", {"layers": 2, "label_smoothing": 0.5}, {"seq": 8})
    assert (len(model.blocks), model.smoothing, len(model.positions.weight)) == (2, 0.5, 128)
    assert len(own("mine_o:LanguageModel", {}, {"seq": 8}).positions.weight) == 8
    assert len(own("mine_o:anything", {"layers": 3}).blocks) == 3
    refused = "leave the option out, or give the function a parameter of this name"
    assert said("mine_o:build", capsys, "--tied", "true", "--z-loss", "0.1", "--layers", "2").splitlines() == [
        "--model mine_o:build cannot be called:",
        f"  - --tied changes nothing: build has no parameter 'tied'; {refused}",
        f"  - --z-loss changes nothing: build has no parameter 'z_loss'; {refused}",
    ]
    assert said("mine_o:build", capsys) == (
        "--seq is missing: --model mine_o:build does not say how long its sequences are (config.seq)"
    )


@pytest.mark.quick
def test_a_function_may_call_abstract_itself(folder: Path) -> None:
    (folder / "mine_i.py").write_text(MODEL + MORE)
    inside, outside = (own(f"mine_i:{name}", {}) for name in ("inside", "outside"))
    assert all(p.is_meta for p in (*inside.parameters(), *outside.parameters()))
    assert recipes(inside) == recipes(outside)


@pytest.mark.quick
def test_models_that_text_does_not_fit(folder: Path, capsys: Capture) -> None:
    (folder / "mine_t.py").write_text(MODEL + MORE)
    for command in ("check", "train"):
        assert said("mine_t:Other", capsys, command=command).splitlines() == [
            "--model mine_t:Other cannot be run on text:",
            "  - its inputs are ids: batches have tokens and labels",
            "  - it does not return one scalar: return the sum of the loss over tokens, '+batch +seq ='",
        ]
    assert said("mine_t:small", capsys, command="train") == (
        "the corpus has 256 token ids, the model's vocabulary is 100"
    )
    assert said("mine_t:Nameless", capsys, command="check").splitlines() == [
        "--model mine_t:Nameless cannot be run on text:",
        "  - no dim is called vocab: give the table's rows this name, so that token ids are known to fit",
    ]


def here(folder: str, *options: str) -> tuple[int, str]:
    """A command in a worker: exit code and what it printed."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        return main([*options]), out.getvalue()


@pytest.mark.quick
def test_a_model_that_needs_labels_trains_without_a_sample(folder: Path) -> None:
    (folder / "mine_n.py").write_text(MODEL + MORE)
    options = ["train", "--model", "mine_n:needy", "--steps", "2", "--batch", "4", "--seq", "16", "--run-dir", "r",
               "--evaluation.sequences", "2"]  # fmt: skip
    ((code, out),) = pool(1).run(here, str(folder), *options)
    assert code == 0 and "no sample of text: the model needs labels, and gives no logits without them" in out
    assert not (folder / "r" / "sample.txt").exists()


def test_ranks_find_the_model_in_the_current_folder(folder: Path) -> None:
    """The program is started from elsewhere, as an installed command is: nothing but its folder says where."""
    (folder / "pack").mkdir()
    (folder / "pack" / "mine_r.py").write_text(MODEL + MORE)
    start = folder / "elsewhere" / "command.py"
    start.parent.mkdir()
    start.write_text("import sys\nfrom dtensor_lm.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    options = ["train", "--model", "pack.mine_r:build", "--mesh", "tp=2", "--steps", "2", "--batch", "4", "--seq", "16",
               "--evaluation.every", "0", "--sample.tokens", "5", "--layers", "2"]  # fmt: skip
    ran = subprocess.run(
        [sys.executable, str(start), *options], cwd=folder, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    (run_dir,) = (folder / "runs").iterdir()
    assert re.match(r"pack\.mine_r\.build-tp2-", run_dir.name)
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[1])["loss"] > 0
    assert (run_dir / "sample.txt").read_text().startswith("def ")


@pytest.mark.quick
def test_the_page_shows_the_file_and_parts_of_it() -> None:
    name = "docs/bring_your_own_model.md"
    every = blocks(name, (ROOT / name).read_text())
    (whole,) = (block.text for block in every if block.notes.get("file") == "my_model.py")
    assert whole == MODEL
    parts = [block.text for block in every if "not run" in block.notes]
    assert len(parts) == 4 and all(part in MODEL for part in parts)
