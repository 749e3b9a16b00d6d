"""torch's pipeline engine: what is used of it, what it does by habit, and what happens when a rank dies inside it."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as engine

import dtensor_lm as dl
from dtensor_lm import schedules
from dtensor_lm.ops.dropout import Moment
from dtensor_lm.schedules import run as runtime
from dtensor_lm.schedules.run import PipelineRunner, _Stage, _StageModule
from dtensor_lm.state import locals_of
from dtensor_lm.testing.case import batch_of
from dtensor_lm.testing.equivalence import parts
from dtensor_lm.testing.workers import pool

# What is used of the engine


@pytest.mark.quick
def test_the_private_parts_are_there() -> None:
    assert str(engine._Action.from_str("3I7")) == "3I7"
    assert list(inspect.signature(engine._add_send_recv).parameters) == [
        "compute_actions",
        "stage_to_rank",
        "num_stages",
    ]
    table = engine._PipelineScheduleRuntime
    assert {"target", "return_outputs", "kwargs"} <= {*inspect.signature(table.step).parameters}
    assert [*inspect.signature(table._prepare_schedule_with_comms).parameters][:2] == ["self", "actions"]
    assert [*inspect.signature(table._initialize_stages).parameters][:3] == ["self", "args", "kwargs"]
    assert {"input_args", "output_args", "group"} <= {*inspect.signature(PipelineStage.__init__).parameters}
    for name in ("backward_one_chunk", "backward_weight_one_chunk"):
        assert callable(getattr(PipelineStage, name))


def _loaded(kind: str, path: str) -> tuple[Any, Any]:
    """The orders of all ranks, as the engine reads them from a file, and as the runner hands them over."""
    step = dl.train_step(_program(kind), dl.sgd(), device="cpu")
    runner = step.runner
    assert isinstance(runner, PipelineRunner)
    table = {rank: [str(a) for a in row] for rank, row in runner.tables[True].items()}
    runner.engine.pipeline_order.clear()
    runner.engine._load_csv(path)
    return table, {rank: [str(a) for a in row] for rank, row in runner.engine.pipeline_order_with_comms.items()}


@pytest.mark.parametrize("kind", ["1f1b", "zb-v"])
def test_the_engine_reads_the_files_that_tables_are_written_to(kind: str, tmp_path: Path) -> None:
    made = _program(kind).pipeline
    assert made is not None
    schedules.write(made.schedule, str(tmp_path / "table.csv"))
    for ours, from_file in pool(2).run(_loaded, kind, str(tmp_path / "table.csv"), timeout=60):
        assert ours == from_file and any("SEND_F" in action for action in ours[0])


# What it does by habit


def _program(schedule: str, micro: int = 4) -> dl.Program:
    built = dl.models.build("tiny", vocab=32, embed=16, heads=2, kv_heads=2, ffn=16, layers=4)
    plan = dl.plans.standard(whole_gradients=True)
    return dl.resolve(built, plan, dl.Mesh(pp=2), batch=micro, seq=8, dtype="float64", schedule=schedule,
                      micro_batches=micro)  # fmt: skip


def _step(program: dl.Program) -> tuple[dl.TrainStep, dict[str, torch.Tensor], float]:
    step = dl.train_step(program, dl.sgd(), device="cpu")
    batch = parts(program, batch_of(program, "some", 0), step.device)
    grads, loss, _, _ = step.gradients(step.init(0), batch)
    return step, grads, loss


class _WithoutShapes(_Stage):
    """A stage that does not tell what it takes and gives."""

    def __init__(self, module: _StageModule, index: int, stages: int, device: torch.device, takes: Any, gives: Any,
                 ranks: dist.ProcessGroup) -> None:  # fmt: skip
        PipelineStage.__init__(self, module, index, stages, device, group=ranks)
        self.module, self.takes = module, takes


class _Later(engine._PipelineScheduleRuntime):
    """An engine that looks at shapes in its first step, when there is a batch."""

    def _initialize_stages(self, args: Any, kwargs: Any, *more: Any, **named: Any) -> None:
        if kwargs:
            super()._initialize_stages(args, kwargs, *more, **named)


def _forwards(shapes: bool) -> Counter[str]:
    """Forwards of each stage while the runner is made and in one step."""
    found: Counter[str] = Counter()
    real = _StageModule.forward

    def counted(self: _StageModule, *received: torch.Tensor, micro: torch.Tensor) -> Any:
        assert self.part.program.held is not None
        found[str(self.part.program.held[0])] += 1
        return real(self, *received, micro=micro)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_StageModule, "forward", counted)
        if not shapes:
            patch.setattr(runtime, "_Stage", _WithoutShapes)
            patch.setattr(runtime, "_PipelineScheduleRuntime", _Later)
        _step(_program("1f1b"))
    return found


def test_no_forward_but_those_of_the_micro_batches() -> None:
    """Without shapes torch runs one more to find them."""
    assert pool(2).run(_forwards, True, timeout=60) == [Counter({"0": 4}), Counter({"1": 4})]
    assert pool(2).run(_forwards, False, timeout=60) == [Counter({"0": 5}), Counter({"1": 5})]


def _scales() -> tuple[float, bool]:
    """Largest ratio of gradients with the engine's own scaling to those without, and whether losses are the same."""
    _, plain, loss = _step(_program("1f1b"))
    real = engine._PipelineScheduleRuntime

    def habit(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "scale_grads": True})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_PipelineScheduleRuntime", habit)
        _, scaled, other = _step(_program("1f1b"))
    name = max(plain, key=lambda n: float(plain[n].abs().max()))
    return float(scaled[name].abs().max() / plain[name].abs().max()), loss == other


@pytest.mark.case("PP-01")
def test_gradients_are_sums_and_not_divided_by_micro_batches() -> None:
    for ratio, same_loss in pool(2).run(_scales, timeout=60):
        assert ratio == pytest.approx(1 / 4) and same_loss


def _hooks(schedule: str) -> tuple[int, int]:
    """(parameters with a gradient, those whose hook was called)."""
    program = _program(schedule)
    step = dl.train_step(program, dl.sgd(), device="cpu")
    values = locals_of(step.init(0).parameters)
    leaves = {name: step._leaf(values[name], p) for name, p in step.parameters.items()}
    called: set[str] = set()
    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(lambda _, name=name: called.add(name))
    step.runner.train(leaves, values, Moment.of(0, 0), parts(program, batch_of(program, "all", 0), step.device))
    return sum(leaf.grad is not None for leaf in leaves.values()), len(called)


def test_hooks_of_parameters_are_not_called_where_a_backward_is_split() -> None:
    """So no reduction may hang on one. (The first stage has nothing to split: its backward is whole, and late.)"""
    for with_gradient, called in pool(2).run(_hooks, "1f1b", timeout=60):
        assert with_gradient == called > 0
    (_, first), (with_gradient, last) = pool(2).run(_hooks, "zb-h1", timeout=60)
    assert with_gradient > 0 and last == 0 and first > 0


def _outputs() -> list[bool]:
    """Whether what stages hand over are views, or not contiguous."""
    found = []
    real = _StageModule.forward

    def looked_at(self: _StageModule, *received: torch.Tensor, micro: torch.Tensor) -> Any:
        out = real(self, *received, micro=micro)
        found.extend(x._is_view() or not x.is_contiguous() for x in out if not self.last)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_StageModule, "forward", looked_at)
        program = _program("zb-h1")
        first = program.model.layers
        assert isinstance(first, nn.ModuleList)
        _step(program)
    return found


def test_stages_hand_over_tensors_of_their_own() -> None:
    first, last = pool(2).run(_outputs, timeout=60)
    assert first == [False] * 4 and last == []


# A rank that dies

_SCRIPT = """
import os, signal, sys
from dtensor_lm import commands
from dtensor_lm.config import TrainConfig, EvaluationConfig, SampleConfig
from dtensor_lm.launch import launch

def work(config):
    from dtensor_lm.schedules.run import _Stage
    real, calls = _Stage.backward_one_chunk, []
    def dies(self, *args, **kwargs):
        calls.append(1)
        if os.environ["RANK"] == "2" and len(calls) == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args, **kwargs)
    _Stage.backward_one_chunk = dies
    os.write(1, f"worker {os.getpid()}\\n".encode())
    return commands.train(config)

if __name__ == "__main__":
    config = TrainConfig(mesh="pp=2,dp=2", schedule=sys.argv[1], batch=8, seq=16, steps=50, run_dir=sys.argv[2],
                         sample=SampleConfig(tokens=0), evaluation=EvaluationConfig(every=0), progress=False)
    sys.exit(launch(work, config, 4, mesh_text=config.mesh))
"""


@pytest.mark.case("LIFE-02")
@pytest.mark.parametrize("schedule, backwards", [("1f1b", 6), ("zb-v", 11)])  # in the second step
def test_a_rank_that_is_killed_in_the_middle_of_a_schedule_ends_the_run(
    schedule: str, backwards: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    launcher = subprocess.Popen(
        [sys.executable, str(script), schedule, str(tmp_path / "run"), str(backwards)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = launcher.communicate(timeout=90)
    workers = [int(line.split()[1]) for line in out.splitlines() if line.startswith("worker")]
    assert launcher.returncode == 1 and len(workers) == 4, (out, err)
    assert "rank 2 of 4 failed" in err and "SIGKILL" in err, err
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1]
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and _alive(pid) for pid in workers):
        assert time.monotonic() < until, "a worker outlives the run"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
