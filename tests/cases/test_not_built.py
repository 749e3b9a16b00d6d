"""What is not built yet is refused by name, with what there is instead, before anything starts.

Sources: pytorch/torchtitan#1232, pytorch/torchtitan#550, huggingface/nanotron#422, pytorch/pytorch#180346,
pytorch/torchtitan#596, pytorch/torchtitan#4167, NVIDIA/Megatron-LM#3023, pytorch/torchtitan#514,
ServiceNow/Fast-LLM#545, vllm-project/vllm#52535, pytorch/pytorch#120934.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from case_runs import refused

import dtensor_lm as dl
from dtensor_lm.config import CheckConfig, PlanConfig, TrainConfig, parse

pytestmark = pytest.mark.quick

CP = "axis cp={}: context parallelism is not built yet: use tp, which also cuts the sequence between its regions"
EP = "axis ep={}: expert parallelism is not built yet: use fsdp, which shards every parameter"

MESHES = [
    pytest.param("cp=2", [CP.format(2)], marks=pytest.mark.case("LOSS-04")),
    pytest.param("dp=2,cp=2", [CP.format(2)], marks=pytest.mark.case("GRAD-04", "DATA-09")),
    pytest.param("ep=2", [EP.format(2)], marks=pytest.mark.case("RNG-01", "UX-04")),
    pytest.param("ep=2,dp=2", [EP.format(2)], marks=pytest.mark.case("GRAD-02")),
    ("ep=4,cp=8", [EP.format(4), CP.format(8)]),
]


@pytest.mark.parametrize(("mesh", "faults"), MESHES)
def test_axes(
    mesh: str, faults: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"  - {fault}\n" for fault in faults)
    for command in ("plan", "check", "train"):
        said = refused([command, "--mesh", mesh], capsys, monkeypatch)
        assert said == f"error: the plan does not fit this model on mesh {mesh}:\n{text}"
    with pytest.raises(dl.PlanError) as error:
        dl.resolve(dl.models.build("tiny", layers=1), dl.plans.standard(), dl.Mesh.parse(mesh))
    assert list(error.value.faults) == faults


COMPILE = "torch.compile is not built yet: leave it out, every step runs eagerly"


@pytest.mark.case("PERF-02")
@pytest.mark.parametrize("spelled", [["--compile"], ["--no-compile"], ["--compile=true"], ["--compile", "true"]])
def test_compile(spelled: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("plan", "check", "train"):
        text = refused([command, *spelled], capsys, monkeypatch)
        assert text == f"error: these options cannot be used\n  - {spelled[0].partition('=')[0]}: {COMPILE}\n"


@pytest.mark.case("PERF-02")
@pytest.mark.parametrize("kind", [PlanConfig, CheckConfig, TrainConfig])
def test_compile_in_a_file(kind: type[PlanConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("seed: 1\ncompile: true\n")
    with pytest.raises(dl.UserError) as error:
        parse(kind, ["--config", "run.yaml", "--lear", "1"], "", "")
    assert error.value.faults[:1] == (f"run.yaml:2: compile: {COMPILE}",)
    assert len(error.value.faults) == 2  # and the others with it


@pytest.mark.case("PERF-02")
def test_compile_in_python() -> None:
    program = dl.resolve(dl.models.build("tiny", layers=1), dl.plans.standard(), dl.Mesh(), batch=2, seq=8)
    with pytest.raises(TypeError, match="compile"):
        dl.train_step(program, dl.sgd(), compile=True)  # type: ignore[call-arg]
