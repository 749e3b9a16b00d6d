"""The command `train` as a user runs it: real processes, the default corpus, a run folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from dtensor_lm import commands
from dtensor_lm.cli import main
from dtensor_lm.config import CheckConfig
from dtensor_lm.testing import equivalence
from dtensor_lm.testing.workers import pool

SMALL = ["--steps", "5", "--batch", "16", "--seq", "32", "--layers", "1", "--evaluation.sequences", "5"]


def command(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "dtensor_lm", *options]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=100)


def here(folder: str, *options: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in a worker: without the time that a new process takes."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return main([*options]), out.getvalue(), err.getvalue()


def as_ranks(folder: str, *options: str) -> tuple[int, str, str]:
    """The same on each rank of a group, as under torchrun: without the time that a launcher takes."""
    variables = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "localhost",
                 "MASTER_PORT": "1"}  # fmt: skip
    with mock.patch.dict(os.environ, variables):
        return here(folder, *options)


def train(folder: Path, name: str, *options: str, ranks: int | None = None) -> list[dict[str, float]]:
    """Of a run on so many ranks, or as a command of its own."""
    words = ["train", *SMALL, "--dtype", "float64", "--run-dir", name, "--sample.tokens", "5",
             "--evaluation.every", "2", *options]  # fmt: skip
    if ranks is None:
        ran = command(*words, cwd=folder)
        assert ran.returncode == 0, ran.stderr
    else:
        for code, _, err in pool(ranks).run(as_ranks, str(folder), *words):
            assert code == 0, err
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder: Path) -> list[dict[str, float]]:
    return train(folder, "one", ranks=1)


def test_a_run_folder(folder: Path, one: list[dict[str, float]]) -> None:
    assert [r["step"] for r in one] == [1, 2, 3, 4, 5]
    for r in one:
        assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second"} <= r.keys()
        assert r["tokens"] == 16 * 32
    assert [r["step"] for r in one if "val_loss" in r] == [2, 4, 5]
    assert one[-1]["loss"] < one[0]["loss"]
    assert (folder / "one" / "sample.txt").read_text().startswith("def ")
    assert "steps: 5" in (folder / "one" / "config.yaml").read_text()


@pytest.mark.case("LOG-01")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(4, ["--mesh", "fsdp=2,tp=2"]), (None, ["--mesh", "dp=2", "--zero", "1", "--micro-batches", "4"])],
)
def test_losses_of_a_mesh_are_those_of_one_process(
    folder: Path, one: list[dict[str, float]], ranks: int | None, options: list[str]
) -> None:
    found = train(folder, "mesh" + "-".join(options), *options, ranks=ranks)
    for ours, expected in zip(found, one, strict=True):
        for key in ("loss", "grad_norm", "val_loss"):
            if key in expected:
                assert abs(ours[key] - expected[key]) <= 1e-10 * abs(expected[key]), (ours, expected)
        assert ours["lr"] == expected["lr"] and ours["tokens"] == expected["tokens"]


def test_a_run_of_the_dumped_configuration_is_the_same(folder: Path, one: list[dict[str, float]]) -> None:
    code, _, err = pool(1).run(here, str(folder), "train", "--config", "one/config.yaml", "--run-dir", "again")[0]
    assert code == 0, err
    again = [json.loads(line) for line in (folder / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in again] == [r["loss"] for r in one]


def test_an_earlier_run_is_not_written_over(folder: Path, one: list[dict[str, float]]) -> None:
    before = (folder / "one" / "metrics.jsonl").read_bytes()
    code, out, err = pool(1).run(here, str(folder), "train", *SMALL, "--run-dir", "one")[0]
    assert (code, out) == (2, "")
    assert err == "error: --run-dir one holds an earlier run: choose another folder, or remove it first\n"
    assert (folder / "one" / "metrics.jsonl").read_bytes() == before


def test_json_is_one_object(folder: Path) -> None:
    options = ["train", *SMALL, "--json", "--run-dir", "json", "--sample.tokens", "0"]
    code, out, _ = pool(1).run(here, str(folder), *options)[0]
    assert code == 0
    assert json.loads(out)["step"] == 5 and json.loads(out)["run_dir"] == "json"


def test_a_run_that_is_not_finite_stops(folder: Path) -> None:
    code, _, err = pool(1).run(
        here, str(folder), "train", *SMALL, "--optimizer.name", "sgd", "--optimizer.lr", "1e30",
        "--optimizer.clip-norm", "0", "--run-dir", "nan",
    )[0]  # fmt: skip
    assert code == 1
    assert "not finite" in err and "Traceback" not in err


@pytest.mark.parametrize(
    "options, message",
    [
        (["train", "--mesh", "dp=0,tp=-1"], "axis tp has size -1"),
        (["train", "--mesh", "xx=2"], "axis xx=2 shards nothing"),
        (["train", "--data", "nowhere"], "no such file"),
        (["train", "--seq", "4000000"], "the longest sequence that works"),
        (["train", "--stepz", "3"], "did you mean --steps?"),
        (["check", "--mesh", "tp=3"], "heads"),
        (["train", "--mesh", "cp=2"], "context parallelism is not built yet"),
        (["train", "--run-dir", "/dev/null/x"], "is not a folder"),
        (["train", "--data", ""], "data is '': must be a name"),
        (["check", "--mesh", "fsdp=" + "9" * 5000], "is not AXIS=SIZE"),
        (["check", "--mesh", "self=1,fsdp=x"], "fsdp=x"),
        (["check", "--mesh", "dp=100"], "too many to start on this machine"),
        (["plan", "--plan", "tp_spp"], "did you mean tp_sp"),
        (["plan", "--model", "llama"], "unknown model"),
        (["fit"], "unknown command"),
    ],
)
def test_bad_input_is_one_message(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    assert main(options) == 2
    out, err = capsys.readouterr()
    assert message in err and err.startswith("error: ")
    assert "Traceback" not in err and not out


def test_all_faults_at_once_and_code_2(folder: Path) -> None:
    options = ["check", "--mesh", "tp=3,xx=2", "--batch", "5", "--micro-batches", "5"]
    code, out, err = pool(1).run(here, str(folder), *options)[0]
    assert code == 2 and not out
    for text in ("axis xx=2 shards nothing", "heads", "vocab", "a sequence of 64"):
        assert text in err


def test_a_process_ends_with_code_2(folder: Path) -> None:
    ran = command("train", "--stepz", "3", cwd=folder)
    assert ran.returncode == 2 and not ran.stdout and "did you mean --steps?" in ran.stderr


@pytest.mark.quick
def test_the_front_door_does_not_import_torch() -> None:
    code = "import sys, dtensor_lm.cli as c; c.main(['--help']); import dtensor_lm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20).returncode == 0


def check_that_is_too_strict() -> int:
    compare = equivalence.compare
    strict = lambda program, **more: replace(compare(program, **more), bounds={})  # noqa: E731
    with mock.patch.object(equivalence, "compare", strict):
        return commands.check(CheckConfig(dtype="bfloat16", layers=1, seq=16))


def test_check_says_no_with_exit_code_1() -> None:
    """bfloat16 is not float64: forced to float64's tolerance, the check must fail."""
    assert pool(1).run(check_that_is_too_strict) == [1]
