"""A whole run: data in, steps, metrics, validation, a sample of text at the end."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from tqdm import tqdm

from dtensor_lm import process_groups
from dtensor_lm.config import TrainConfig, dump
from dtensor_lm.errors import ConfigError, DataError, UserError
from dtensor_lm.from_config import program_of
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.training import learning_rate
from dtensor_lm.training.feed import Feed
from dtensor_lm.training.optimizer import SGD, AdamW, Optimizer
from dtensor_lm.training.sample import no_sample, sample
from dtensor_lm.training.step import TrainStep, train_step


class RunFailed(RuntimeError):
    """The run cannot go on: its loss or norm is not finite."""


def check_run_dir(run_dir: str | None) -> None:
    """Raises `ConfigError` rather than write over an earlier run, or find out late that nothing can be written."""
    if run_dir is None:
        return
    path = Path(run_dir)
    try:
        if (path / "metrics.jsonl").exists():
            raise ConfigError(f"--run-dir {run_dir} holds an earlier run: choose another folder, or remove it first")
        above = next(p for p in (path, *path.parents) if p.exists())
        if not above.is_dir():
            raise ConfigError(f"--run-dir {run_dir}: {above} is not a folder")
        if not os.access(above, os.W_OK):
            raise ConfigError(f"--run-dir {run_dir}: {above} cannot be written: choose another folder")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"--run-dir {run_dir}: {error}: choose another folder") from None


def feed_of(config: TrainConfig, program: Program) -> Feed:
    return Feed(program, config.data, config.seed, config.evaluation.sequences, config.device)


def optimizer_of(config: TrainConfig) -> Optimizer:
    o = config.optimizer
    if o.name == "sgd":
        return SGD(o.lr, o.momentum, o.weight_decay)
    return AdamW(o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay)


class Folder:
    """The run folder, written by rank 0 alone: config.yaml, metrics.jsonl, sample.txt."""

    def __init__(self, config: TrainConfig) -> None:
        model, mesh = config.model.replace(":", "."), config.mesh.replace("=", "").replace(",", "-") or "one"
        name = f"{model}-{mesh}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.path = Path(config.run_dir or f"runs/{name}-{os.getpid()}")  # two runs may start in one second
        self.metrics: TextIO | None = None
        fault: UserError | None = None
        if dist.get_rank() == 0:
            try:
                check_run_dir(config.run_dir)
                self.path.mkdir(parents=True, exist_ok=True)
                (self.path / "config.yaml").write_text(dump(config), encoding="utf-8")
                self.metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8")
            except UserError as error:
                fault = error
            except OSError as error:
                fault = ConfigError(f"--run-dir {self.path}: {error.strerror}: choose a folder that can be written")
        fault = _agree(fault)
        if fault is not None:
            raise fault

    def write(self, record: dict[str, object]) -> None:
        if self.metrics is not None:
            self.metrics.write(json.dumps(record) + "\n")
            self.metrics.flush()


def _agree(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _named(names: tuple[str, ...]) -> str:
    """' (in ...)' with the first names, or ''."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (in {', '.join(names[:3])}{more})" if names else ""


def run(config: TrainConfig) -> int:
    """Trains as the options say. Returns the exit code."""
    process_groups.start(process_groups.device(config.device))
    program = program_of(config)
    data = feed_of(config, program)
    if _agree(data.digest()) != data.digest():
        raise DataError(f"rank {dist.get_rank()} reads another corpus than rank 0: give every node the same files")
    s = config.lr_schedule
    rate = learning_rate.make(s.kind, config.steps, s.warmup_steps, s.decay_steps, s.final_fraction)
    step = train_step(program, optimizer_of(config), lr_schedule=rate, clip_norm=config.optimizer.clip_norm,
                      device=config.device)  # fmt: skip
    folder = Folder(config)
    try:
        return _Run(config, program, data, step, folder).run()
    except RunFailed as error:
        if dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        return 1


class _Run:
    def __init__(self, config: TrainConfig, program: Program, data: Feed, step: TrainStep, folder: Folder) -> None:
        self.config, self.program, self.data, self.step, self.folder = config, program, data, step, folder
        self.first = dist.get_rank() == 0
        self.quiet = config.json or not self.first

    def say(self, text: str) -> None:
        if not self.quiet:
            tqdm.write(text)

    def run(self) -> int:
        config, step = self.config, self.step
        count = sum(math.prod(p.storage.shape) for p in self.program.parameters.values())
        self.say(f"{config.model}: {count:,} parameters on mesh {config.mesh or '(one process)'}, {config.dtype}, "
                 f"{step.device.type}; {self.data.corpus.describe()}")  # fmt: skip
        state = step.init(config.seed)
        hidden = self.quiet or not config.progress or not sys.stderr.isatty()
        bar = tqdm(total=config.steps, disable=hidden, unit="step", dynamic_ncols=True)
        record: dict[str, object] = {}
        for i in range(config.steps):
            began = time.perf_counter()
            state, metrics = step(state, self.data.batch(i))
            seconds = time.perf_counter() - began
            record = {
                "step": i + 1, "loss": metrics.loss, "grad_norm": metrics.grad_norm, "lr": metrics.lr,
                "tokens": metrics.tokens, "tokens_per_second": metrics.tokens / seconds,
            }  # fmt: skip
            every = config.evaluation.every
            if every and ((i + 1) % every == 0 or i + 1 == config.steps):
                record["val_loss"] = step.evaluate(state, self.data.validation())
                self.say(f"step {i + 1:5}  loss {metrics.loss:.4f}  validation {record['val_loss']:.4f}  "
                         f"norm {metrics.grad_norm:.3f}  {record['tokens_per_second']:,.0f} tokens/s")  # fmt: skip
            self.folder.write(record)
            if not (math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm)):
                raise RunFailed(f"step {i + 1}: loss {metrics.loss}, gradient norm {metrics.grad_norm}: not finite"
                                f"{_named(metrics.not_finite)}; a smaller --optimizer.lr may help "
                                f"(metrics are in {self.folder.path})")  # fmt: skip
            bar.update()
            bar.set_postfix_str(f"loss {metrics.loss:.3f}, {record['tokens_per_second']:,.0f} tokens/s", refresh=False)
        bar.close()
        if record and "val_loss" not in record:
            self.say(f"step {config.steps:5}  loss {record['loss']:.4f}  norm {record['grad_norm']:.3f}")
        text = sample(self.program, state, self.data.corpus, config.sample, config.seed, step.device)
        if self.first and text is not None:
            (self.folder.path / "sample.txt").write_text(text, encoding="utf-8")
            self.say(f"\nsample:\n{text}\n")
        elif config.sample.tokens and (why := no_sample(self.program)):
            self.say(f"no sample of text: {why}")
        self.say(f"run folder: {self.folder.path}")
        if self.first and config.json:
            print(json.dumps({**record, "run_dir": str(self.folder.path)}))
        return 0
