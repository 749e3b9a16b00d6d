"""The configuration: files, the command line, every fault at once, and that a dumped one reads back."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dtensor_lm.config import (
    CheckConfig,
    EvaluationConfig,
    OptimizerConfig,
    PlanConfig,
    ProgramConfig,
    SampleConfig,
    ScheduleConfig,
    TrainConfig,
    dump,
    parse,
)
from dtensor_lm.errors import ConfigError

pytestmark = pytest.mark.quick

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes run.yaml in the current directory, so that messages have a short path."""
    monkeypatch.chdir(tmp_path)

    def write_text(text: str) -> str:
        Path("run.yaml").write_text(text)
        return "run.yaml"

    return write_text


def train(*argv: str) -> TrainConfig:
    return parse(TrainConfig, list(argv), "dtensor-lm train", "Train a model.")


def faults(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        train(*argv)
    assert caught.value.title == "these options cannot be used"
    return list(caught.value.faults)


# What is read


def test_defaults() -> None:
    assert train() == TrainConfig()
    assert parse(PlanConfig, [], "plan", "") == PlanConfig()
    check = parse(CheckConfig, [], "check", "")
    assert (check.dtype, check.steps, check.batch, check.seq) == ("float64", 3, None, None)
    assert (TrainConfig().batch, TrainConfig().seq, TrainConfig().dtype) == (16, 128, "float32")


def test_the_command_line_in_every_spelling() -> None:
    read = train(
        "--mesh", "fsdp=2,tp=4", "--micro_batches", "2", "--zero=3", "--no-sequence-parallel", "--json",
        "--optimizer.weight-decay=0", "--optimizer.clip_norm", "2", "--sample.prompt", "-x",
        "--layers", "none",
        "--tied", "false", "--plan=", "--plan", "mine.yaml", "--lr-schedule.kind", "wsd", "--no-progress",
    )  # fmt: skip
    assert read == TrainConfig(
        mesh="fsdp=2,tp=4", micro_batches=2, zero=3, sequence_parallel=False, json=True, tied=False,
        plan="mine.yaml", progress=False, optimizer=OptimizerConfig(weight_decay=0.0, clip_norm=2.0),
        lr_schedule=ScheduleConfig(kind="wsd"), sample=SampleConfig(prompt="-x"),
    )  # fmt: skip
    assert isinstance(read.optimizer.weight_decay, float)


@pytest.mark.parametrize("place", ["first", "last", "equals"])
def test_the_command_line_overrides_the_file(place: str, write: Write) -> None:
    path = write("batch: 8\noptimizer:\n  lr: 1.0\n  weight-decay: 0.5\n")
    config = [f"--config={path}"] if place == "equals" else ["--config", path]
    others = ["--optimizer.lr", "2"]
    read = train(*config, *others) if place == "first" else train(*others, *config)
    assert read == TrainConfig(batch=8, optimizer=OptimizerConfig(lr=2.0, weight_decay=0.5))


def test_what_yaml_itself_would_read_differently(write: Write) -> None:
    read = train(
        "--config",
        write(
            "optimizer: {lr: 3e-4, eps: 1E-9, beta1: 0}\nsample:\n  prompt: no\n"
            "run_dir: 2024-01-01\nseq: 1_024\n"
            "model: 123\njson: yes\ntied: on\ndata: ~\nmesh: ''\n"
        ),
    )
    assert read.optimizer == OptimizerConfig(lr=3e-4, eps=1e-9, beta1=0.0)
    assert (read.sample.prompt, read.run_dir, read.seq, read.model) == ("no", "2024-01-01", 1024, "123")
    assert (read.json, read.tied, read.data, read.mesh) == (True, True, None, "")
    assert faults("--config", write("seq: 010\nbatch: 1:30\n")) == [
        "run.yaml:1: seq is '010': expected a whole number",
        "run.yaml:2: batch is '1:30': expected a whole number",
    ]


@pytest.mark.parametrize("text", ["", "# nothing\n", "null\n", "{}\n", "optimizer:\n", "---\n"])
def test_an_empty_file_changes_nothing(text: str, write: Write) -> None:
    assert train("--config", write(text)) == TrainConfig()


def test_yaml_merges(write: Write) -> None:
    path = write("optimizer: &o {lr: 1.0}\nlr_schedule:\n  <<: {kind: wsd, warmup_steps: 3}\n  kind: constant\n")
    assert train("--config", path).lr_schedule == ScheduleConfig(kind="constant", warmup_steps=3)


# What is refused


def test_every_fault_of_the_file_and_of_the_command_line_at_once(write: Write) -> None:
    path = write(
        "modle: tiny\nbatch: many\nlr: 1\nseq: '8'\noptimizer:\n  lrr: 1\n  lr: [1]\n  name: adam\n"
        "lr_schedule: 3\nsteps: null\nseed: 1\nseed: 2\nzero: 4\n"
    )
    assert faults(
        "--config", path, "--optimizer.lrr", "3", "--bach=4", "--layers", "two", "extra", "--json=1",
        "--optimizer.beta1", "1", "--device", "gpu", "--sample.temperature",
    ) == [
        "run.yaml:12: seed is given twice",
        "run.yaml:1: modle: unknown key (did you mean model?)",
        "run.yaml:2: batch is 'many': expected a whole number",
        "run.yaml:3: lr: unknown key (did you mean optimizer.lr?)",
        "run.yaml:4: seq is the text '8': expected a whole number",
        "run.yaml:6: optimizer.lrr: unknown key (did you mean optimizer.lr?)",
        "run.yaml:7: optimizer.lr is a list: expected a number",
        "run.yaml:8: optimizer.name is 'adam': expected one of adamw, sgd",
        "run.yaml:9: lr_schedule is '3': expected a mapping of options",
        "run.yaml:10: steps is null: expected a whole number",
        "run.yaml:13: zero is '4': expected one of 0, 1, 2, 3",
        "--optimizer.lrr: unknown option (did you mean --optimizer.lr?)",
        "--bach: unknown option (did you mean --batch?)",
        "--layers is 'two': expected a whole number or none",
        "'extra': unexpected argument; options start with --",
        "--json takes no value: write --json or --no-json",
        "--device is 'gpu': expected one of auto, cpu, cuda",
        "--sample.temperature: a value is missing: expected a number",
        "optimizer.beta1 is 1.0: must be at least 0 and below 1",
    ]  # fmt: skip


def test_every_value_out_of_range_at_once() -> None:
    assert faults(
        "--batch", "0", "--seq=0", "--micro-batches", "0", "--layers", "0", "--label-smoothing", "1",
        "--steps", "-1",
        "--optimizer.lr", "nan", "--optimizer.eps", "0", "--sample.temperature=-0.5", "--z-loss", "inf",
        "--model", "",
        "--lr-schedule.final-fraction", "1.5",
    ) == [
        "model is '': must be a name",
        "batch is 0: must be at least 1",
        "seq is 0: must be at least 1",
        "micro_batches is 0: must be at least 1",
        "layers is 0: must be from 1 to 10000",
        "label_smoothing is 1.0: must be at least 0 and below 1",
        "z_loss is inf: must be finite",
        "steps is -1: must be 0 or more",
        "optimizer.lr is nan: must be finite",
        "optimizer.eps is 0.0: must be above 0",
        "lr_schedule.final_fraction is 1.5: must be from 0 to 1",
        "sample.temperature is -0.5: must be 0, or at least 0.001",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="seq is 0: must be at least 1"):
        TrainConfig(seq=0).validate()
    TrainConfig().validate()


@pytest.mark.parametrize(
    ("parts", "batch", "near"),
    [(3, 16, "2 or 4"), (20, 16, "16"), (5, 6, "3 or 6"), (2, 7, "1 or 7")],
)
def test_micro_batches_divide_the_batch(parts: int, batch: int, near: str) -> None:
    assert faults("--micro-batches", str(parts), "--batch", str(batch)) == [
        f"micro_batches is {parts}: must divide batch {batch}; nearest: {near}"
    ]


def test_files_that_cannot_be_read(write: Write) -> None:
    assert faults("--config", "none.yaml") == ["none.yaml: cannot be read (No such file or directory)"]
    assert faults("--config", ".") == [".: cannot be read (Is a directory)"]
    assert faults("--config") == ["--config: a value is missing: expected a YAML file"]
    assert faults("--config", "a", "--config=b") == ["--config is given 2 times (a, b): give one file"]
    assert faults("--config", write("- 1\n")) == ["run.yaml:1: the file is a list: expected a mapping of options"]
    assert faults("--config", write("batch\n")) == ["run.yaml:1: the file is 'batch': expected a mapping of options"]
    assert faults("--config", write("batch: 1\nseq: [1\n")) == [
        "run.yaml:3: invalid YAML: expected ',' or ']', but got '<stream end>'"
    ]
    Path("run.yaml").write_bytes(b"model: \xff\n")
    assert faults("--config", "run.yaml") == ["run.yaml: is not UTF-8 text"]
    assert faults("--config", write("model: \x07\n"))[0].startswith("run.yaml: invalid YAML: ")


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from(["--batch", "--json", "--lr", "--config", "4", "x", "--optimizer.lr=1", "=", "--", "-"]))
)
def test_any_arguments_give_a_configuration_or_a_config_error(argv: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        train(*argv)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="abt: \n-{}[]&*!|>'\"#%1.~<,ch", max_size=40))
def test_any_file_gives_a_configuration_or_a_config_error(text: str, write: Write) -> None:
    with contextlib.suppress(ConfigError):
        train("--config", write(text))


# What is written


def _text() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def _numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, exclude_max=True)


_CONFIGS = st.builds(
    TrainConfig,
    model=_text().filter(str.strip), mesh=_text(), plan=_text().filter(str.strip),
    zero=st.sampled_from([0, 1, 2, 3]), sequence_parallel=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16", "float64"]), batch=st.integers(1, 10**6),
    seq=st.integers(1, 10**9), layers=st.none() | st.integers(1, 99), tied=st.none() | st.booleans(),
    label_smoothing=_numbers(0, 1), z_loss=_numbers(0, 1e300), seed=st.integers(0, 2**63 - 1),
    json=st.booleans(),
    steps=st.integers(0, 10**9), data=st.none() | _text().filter(str.strip),
    run_dir=st.none() | _text().filter(str.strip),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    optimizer=st.builds(
        OptimizerConfig, lr=_numbers(5e-324, 1e308), beta1=_numbers(0, 1),
        decay=st.sampled_from(["matrices", "all"])
    ),
    lr_schedule=st.builds(ScheduleConfig, kind=st.sampled_from(["cosine", "wsd"])),
    evaluation=st.builds(EvaluationConfig, every=st.integers(0, 99), sequences=st.integers(1, 99)),
    sample=st.builds(SampleConfig, prompt=_text(), temperature=st.just(0.0) | _numbers(1e-3, 9)),
    progress=st.booleans(),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=_CONFIGS)
def test_what_is_dumped_reads_back_equal(config: TrainConfig, write: Write) -> None:
    assert train("--config", write(dump(config))) == config


def test_a_dump_is_short_and_in_order(write: Write) -> None:
    assert dump(PlanConfig(mesh="tp=2")).splitlines()[:4] == [
        "model: tiny", "mesh: tp=2", "plan: standard", "zero: 0",
    ]  # fmt: skip
    assert parse(CheckConfig, ["--config", write(dump(CheckConfig(batch=4)))], "", "") == CheckConfig(batch=4)


# Help


@pytest.mark.parametrize("kind", [PlanConfig, CheckConfig, TrainConfig])
def test_help_shows_every_option(kind: type[ProgramConfig], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(kind, ["--config", "missing.yaml", "--wrong", "--help"], "dtensor-lm x", "What it does.")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: dtensor-lm x") and "What it does." in out and "--config FILE.yaml" in out
    for each in dataclasses.fields(kind):
        if not dataclasses.is_dataclass(each.default_factory):
            assert f"--{each.name.replace('_', '-')}" in out
    assert "Sequences per step over all ranks" in out


def test_every_field_has_a_text() -> None:
    import inspect
    import re

    import dtensor_lm.config as module

    source = inspect.getsource(module)
    for kind in (TrainConfig, CheckConfig, OptimizerConfig, ScheduleConfig, EvaluationConfig, SampleConfig):
        for each in dataclasses.fields(kind):
            assert re.search(rf'\n    {each.name}: .*\n    """[A-Z0-9a-z].*\."""\n', source), each.name


def test_importing_it_loads_neither_torch_nor_tyro() -> None:
    program = "import sys, dtensor_lm.config; print(*[m for m in ('torch', 'tyro', 'yaml') if m in sys.modules])"
    done: Any = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_options_that_would_do_nothing_are_refused() -> None:
    argv = ["--optimizer.momentum", "0.9", "--lr-schedule.decay-steps", "5"]
    with pytest.raises(ConfigError) as error:
        parse(TrainConfig, argv, "dtensor-lm train", "")
    assert error.value.faults == (
        "optimizer.momentum is of sgd; adamw has optimizer.beta1",
        "lr_schedule.decay_steps is of the schedule wsd; cosine does not use it",
    )
    with pytest.raises(ConfigError, match=r"optimizer\.beta1 is of adamw"):
        parse(TrainConfig, ["--optimizer.name", "sgd", "--optimizer.beta1", "0.5"], "dtensor-lm train", "")
