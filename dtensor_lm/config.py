"""The options of the commands as typed data. Text under a field is its help; how they are read is `options`.

    parse(TrainConfig, ["--config", "run.yaml", "--optimizer.lr", "1e-3"], "dtensor-lm train", "...")

The command line overrides the file, the file overrides the defaults. Every fault of both is shown at once.
The file mirrors the classes: `optimizer: {lr: 3e-4}`. No torch is imported.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from dtensor_lm import options
from dtensor_lm.errors import ConfigError
from dtensor_lm.options import Fault, Kind

TITLE = "these options cannot be used"  # of every ConfigError from here
# Options that other trainers have, and what there is instead.
NOT_BUILT = {
    "compile": "torch.compile is not built yet: leave it out, every step runs eagerly",
    **{f"schedule.{name}": f"the learning rate's options are called lr_schedule.{name}; schedule is of pipelines"
       for name in ("kind", "warmup_steps", "decay_steps", "final_fraction")},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """What plan, check and train share: the model, the mesh and how one step is divided."""

    model: str = "tiny"
    """Name of the model, or package.module:function that returns one of your own."""
    mesh: str = ""
    """Axes and sizes, such as fsdp=2,tp=4; empty is one process."""
    plan: str = "standard"
    """Name of a sharding plan, or a YAML file with one."""
    zero: Literal[0, 1, 2, 3] = 0
    """What is sharded over data: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    sequence_parallel: bool = True
    """Shard the sequence between tensor-parallel regions."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the computation."""
    batch: int | None = None
    """Sequences per step over all ranks; None chooses from the mesh and the model."""
    seq: int | None = None
    """Tokens per sequence; None chooses from the mesh and the model."""
    micro_batches: int | None = None
    """Parts of the batch that go through the model one after another; None is 1, or 2 for each pipeline rank."""
    schedule: str | None = None
    """Order of work in a pipeline (an axis pp): a name (see draw schedule --help), or a CSV file; None is 1f1b."""
    virtual_stages: int | None = None
    """Stages on each rank of a pipeline; None as the schedule has it."""
    split: str | None = None
    """Layers of each stage of a pipeline, such as 3,5,5,3; None balances their cost."""
    accumulate: int = 1
    """Runs of a pipeline's schedule in a step; the micro-batches are divided over them."""
    layers: int | None = None
    """Number of layers; None as the model says."""
    tied: bool | None = None
    """Whether the head shares the embedding's weights; None as the model says."""
    label_smoothing: float = 0.0
    """Weight of the uniform distribution in the target, 0 to below 1."""
    z_loss: float = 0.0
    """Weight of the squared log-partition function in the loss."""
    dropout: float | None = None
    """Probability of dropout, 0 to below 1, in models that have it; None as the model says."""
    seed: int = 0
    """Seed of initial values and of the order of the data."""
    json: bool = False
    """Print one JSON object instead of text."""

    def validate(self) -> None:
        """Raises `ConfigError` with every value that is out of range."""
        if faults := [text for _, text in _range_faults(self)]:
            raise ConfigError(TITLE, faults)


@dataclass(frozen=True, kw_only=True)
class PlanConfig(ProgramConfig):
    """Options of `plan`."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig(ProgramConfig):
    """Options of `check`."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float64"
    """Type of the computation; float64 tells a wrong gradient from rounding."""
    steps: int = 3
    """SGD steps that are compared with one process."""
    regions: bool = False
    """Check the signatures of the model instead, in one process: each declared cut, region by region."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW or plain SGD."""
    lr: float = 6e-3
    """Learning rate after the warm-up."""
    beta1: float = 0.9
    """AdamW: decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW: decay of the mean of squared gradients."""
    eps: float = 1e-8
    """AdamW: added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    decay: Literal["matrices", "all"] = "matrices"
    """Which parameters decay: matrices only, or all."""
    momentum: float = 0.0
    """SGD: momentum."""
    clip_norm: float = 1.0
    """Largest norm of all gradients together; 0 does not clip, the norm is still reported."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; wsd is warm-up, stable, decay."""
    warmup_steps: int = 20
    """Steps in which the rate rises from 0."""
    decay_steps: int = 0
    """wsd: last steps, in which the rate falls."""
    final_fraction: float = 0.1
    """Rate at the end as a fraction of lr."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The validation loss."""

    every: int = 100
    """Steps between evaluations; 0 does not evaluate."""
    sequences: int = 128
    """Sequences per evaluation."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that is generated at the end."""

    tokens: int = 300
    """Tokens to generate; 0 generates none."""
    prompt: str = "def "
    """Text to continue."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the most likely token."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ProgramConfig):
    """Options of `train`."""

    batch: int = 16
    """Sequences per step over all ranks."""
    seq: int = 128
    """Tokens per sequence."""
    steps: int = 700
    """Steps of the whole run."""
    data: str | None = None
    """File or folder of text to train on; None takes the source of Python's standard library."""
    run_dir: str | None = None
    """Folder for the configuration, metrics and sample; None makes one under runs/."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA where it can."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    lr_schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the steps."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """The validation loss."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """The text that is generated at the end."""
    progress: bool = True
    """Show a progress bar on a terminal."""


_Rule = tuple[Callable[[Any], bool], str]
_POSITIVE: _Rule = (lambda value: value >= 1, "at least 1")
_NOT_NEGATIVE: _Rule = (lambda value: value >= 0, "0 or more")
_ABOVE_0: _Rule = (lambda value: value > 0, "above 0")
_BELOW_1: _Rule = (lambda value: 0 <= value < 1, "at least 0 and below 1")
_TO_1: _Rule = (lambda value: 0 <= value <= 1, "from 0 to 1")
_SEED: _Rule = (lambda value: 0 <= value < 2**63, "from 0 to 2**63 - 1")
_NAME: _Rule = (lambda value: bool(value.strip()), "a name")

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        ["batch", "seq", "micro_batches", "ranks", "stages", "virtual_stages", "accumulate", "evaluation.sequences"],
        _POSITIVE,
    ),
    "layers": (lambda value: 1 <= value <= 10_000, "from 1 to 10000"),
    **dict.fromkeys(["steps", "z_loss", "evaluation.every", "sample.tokens"], _NOT_NEGATIVE),
    **dict.fromkeys(["optimizer.weight_decay", "optimizer.clip_norm"], _NOT_NEGATIVE),
    **dict.fromkeys(["lr_schedule.warmup_steps", "lr_schedule.decay_steps"], _NOT_NEGATIVE),
    **dict.fromkeys(["optimizer.lr", "optimizer.eps"], _ABOVE_0),
    **dict.fromkeys(
        ["label_smoothing", "dropout", "optimizer.beta1", "optimizer.beta2", "optimizer.momentum"], _BELOW_1
    ),
    "lr_schedule.final_fraction": _TO_1,
    "sample.temperature": (lambda value: value == 0 or value >= 1e-3, "0, or at least 0.001"),
    "seed": _SEED,
    **dict.fromkeys(["model", "plan", "data", "run_dir", "file", "csv", "svg", "schedule"], _NAME),
    "split": (
        lambda value: bool(re.fullmatch(r"\s*[1-9]\d{0,4}\s*(,\s*[1-9]\d{0,4}\s*)*", value)),
        "the layers of each stage, such as 3,5,5,3",
    ),
}


def _range_faults(config: Any) -> list[tuple[str, str]]:
    """(place, text) of every value out of its range."""
    faults = []
    for place in options.places_of(type(config)):
        value: Any = config
        for name in place.split("."):
            value = getattr(value, name)
        if isinstance(value, float) and not math.isfinite(value):
            faults.append((place, f"{place} is {value}: must be finite"))
        elif isinstance(value, int) and place != "seed" and value >= 2**31:
            faults.append((place, f"{place} is {value}: must be below 2**31"))
        elif place in _RULES and value is not None and not _RULES[place][0](value):
            faults.append((place, f"{place} is {value!r}: must be {_RULES[place][1]}"))
    parts, batch = getattr(config, "micro_batches", None) or 1, getattr(config, "batch", None)
    if batch is not None and batch >= 1 and parts >= 1 and batch % parts:
        small = [each for each in range(1, math.isqrt(batch) + 1) if batch % each == 0]
        divisors = sorted({*small, *(batch // each for each in small)})
        lower, upper = (
            [each for each in divisors if each < parts],
            [each for each in divisors if each > parts],
        )
        near = " or ".join(map(str, lower[-1:] + upper[:1]))
        text = f"micro_batches is {parts}: must divide batch {batch}; nearest: {near}"
        faults.append(("micro_batches", text))
    if isinstance(config, TrainConfig):
        faults += _idle_options(config)
    if isinstance(config, CheckConfig) and config.regions:
        faults += _idle_with_regions(config)
    return faults


def _idle_options(config: TrainConfig) -> list[tuple[str, str]]:
    """Options that were given and would do nothing."""
    faults = []
    optimizer, schedule, plain = config.optimizer, config.lr_schedule, OptimizerConfig()
    if optimizer.name == "adamw" and optimizer.momentum:
        faults.append(("optimizer.momentum", "optimizer.momentum is of sgd; adamw has optimizer.beta1"))
    for name in ("beta1", "beta2", "eps"):
        if optimizer.name == "sgd" and getattr(optimizer, name) != getattr(plain, name):
            faults.append((f"optimizer.{name}", f"optimizer.{name} is of adamw; sgd does not use it"))
    if schedule.decay_steps and schedule.kind != "wsd":
        text = f"lr_schedule.decay_steps is of the schedule wsd; {schedule.kind} does not use it"
        faults.append(("lr_schedule.decay_steps", text))
    return faults


def _idle_with_regions(config: CheckConfig) -> list[tuple[str, str]]:
    """Options of the comparison with one device, which a check of signatures would not use."""
    reasons = {
        **dict.fromkeys(("mesh", "plan", "zero", "sequence_parallel"), "it runs in one process, without mesh or plan"),
        "dtype": "it computes in float64",
        "micro_batches": "its batch is one",
        "steps": "it trains nothing",
    }
    plain = CheckConfig()
    return [
        (place, f"{place} would do nothing: the check of regions is on, and {reason}")
        for place, reason in reasons.items()
        if getattr(config, place) != getattr(plain, place)
    ]


def parse(
    kind: type[Kind], argv: list[str], prog: str, description: str, more: Callable[[Kind], list[Fault]] | None = None
) -> Kind:
    """The configuration of a command.

    Args:
        kind: Its class.
        argv: Its arguments, without the program's name. `--config FILE.yaml` may stand anywhere.
        prog, description: For `--help`, which prints and exits with 0.
        more: (place, text) of further faults of the values.

    Raises:
        ConfigError: Every fault of the file, of the command line, and every value out of range.
    """
    if any(argument in ("-h", "--help") for argument in argv):
        text = f"{description}\n\n--config FILE.yaml reads values from a file; options override them."
        options.run_tyro(kind(), ["--help"], prog, text)
    places = options.places_of(kind)
    given, path, faults = options.read_arguments(argv, places, NOT_BUILT)
    values, file_faults = options.read_file(path, places, NOT_BUILT) if path is not None else ({}, [])
    faults = file_faults + faults
    # Ranges are checked where a value could be read, so that one answer shows everything.
    skip = {place for place, _ in faults}
    skip |= {"micro_batches"} if "batch" in skip else set()
    merged = options.build(kind, {**values, **given})
    found = _range_faults(merged) + (more(merged) if more is not None else [])
    faults += [(place, text) for place, text in found if place not in skip]
    if faults:
        raise ConfigError(TITLE, [text for _, text in faults])
    spelled = [options.as_option(place, value, places[place]) for place, value in given.items()]
    return options.run_tyro(options.build(kind, values), spelled, prog, description)


def dump(config: ProgramConfig) -> str:
    """YAML with every value; `parse` with it as `--config` gives an equal object."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
