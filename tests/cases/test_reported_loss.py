"""The loss that a run reports is that of the whole batch, once per step, in the console and in the file.

Sources: pytorch/torchtitan#1232, pytorch/torchtitan#550, huggingface/nanotron#422.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dtensor_lm as dl
from dtensor_lm.config import EvaluationConfig, SampleConfig, ScheduleConfig, TrainConfig
from dtensor_lm.from_config import program_of
from dtensor_lm.models.single import single_device
from dtensor_lm.testing.equivalence import gathered
from dtensor_lm.testing.workers import pool
from dtensor_lm.training import loop

STEPS = 4
RUNS = {
    "one process": {},
    "replicas": {"mesh": "dp=4", "zero": 1},
    "shards and tensor parallelism": {"mesh": "dp=2,tp=2", "zero": 3, "micro_batches": 2},
    "json": {"mesh": "tp=2", "json": True},
    "a pipeline": {"mesh": "pp=2", "layers": 2, "schedule": "zb-h1"},
    "pipelines and replicas": {"mesh": "pp=4,dp=2", "layers": 4, "micro_batches": 4},
}


def trained(config: TrainConfig) -> tuple[int, str]:
    """Exit code and console of this rank."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        return loop.run(config), text.getvalue()


def losses_of_plain_pytorch(config: TrainConfig) -> list[float]:
    """The mean loss per token of the whole batch of each step: the model, torch's AdamW, and the text."""
    config = replace(config, mesh="", zero=0, micro_batches=1, schedule=None)
    program, o = program_of(config), config.optimizer
    values = gathered(dl.train_step(program, dl.sgd(), device="cpu").init(config.seed).parameters)
    model, feed, losses = single_device(program.model, values), loop.feed_of(config, program), []
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == decays], "weight_decay": o.weight_decay * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
    for i in range(STEPS):
        tokens, labels = map(torch.from_numpy, feed.training.rows(i, range(config.batch)))
        loss = model(tokens, labels) / labels.numel()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        optimizer.step()
    return losses


@pytest.mark.case("LOG-01")
@pytest.mark.parametrize("name", RUNS)
def test_console_and_file_have_the_loss_of_the_whole_batch(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(1000)))
    config = TrainConfig(
        batch=8, seq=16, steps=STEPS, dtype="float64", data=str(tmp_path / "text.txt"),
        run_dir=str(tmp_path / "run"), device="cpu", evaluation=EvaluationConfig(every=1, sequences=4),
        lr_schedule=ScheduleConfig(kind="constant", warmup_steps=0), sample=SampleConfig(tokens=0), progress=False,
        **{"layers": 1, **RUNS[name]},
    )  # fmt: skip
    (code, console), *others = pool(dl.Mesh.parse(config.mesh).size).run(trained, config)
    assert code == 0 and all(other == (0, "") for other in others)  # rank 0 alone reports

    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    expected = pool(1).run(losses_of_plain_pytorch, config)[0]
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=1e-9)

    if config.json:
        assert json.loads(console)["loss"] == records[-1]["loss"]
    else:
        said = re.findall(r"^step +(\d+)  loss ([\d.]+)  validation ([\d.]+)", console, re.MULTILINE)
        assert said == [(str(r["step"]), f"{r['loss']:.4f}", f"{r['val_loss']:.4f}") for r in records]
