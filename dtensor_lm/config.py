"""The options of the commands as typed data, read from a YAML file and the command line.

    parse(TrainConfig, ["--config", "run.yaml", "--optimizer.lr", "1e-3"], "dtensor-lm train", "...")

The command line overrides the file, the file overrides the defaults. Every fault of both is shown at once.
The file mirrors the classes: `optimizer: {lr: 3e-4}`. Text under a field is its help. No torch is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin

from dtensor_lm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """What plan, check and train share: the model, the mesh and how one step is divided."""

    model: str = "tiny"
    """Name of the model."""
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
    micro_batches: int = 1
    """Parts of the batch that go through the model one after another; divides batch."""
    layers: int | None = None
    """Number of layers; None as the model says."""
    tied: bool | None = None
    """Whether the head shares the embedding's weights; None as the model says."""
    label_smoothing: float = 0.0
    """Weight of the uniform distribution in the target, 0 to below 1."""
    z_loss: float = 0.0
    """Weight of the squared log-partition function in the loss."""
    seed: int = 0
    """Seed of initial values, data order and dropout."""
    json: bool = False
    """Print one JSON object instead of text."""

    def validate(self) -> None:
        """Raises `ConfigError` with every value that is out of range."""
        if faults := [text for _, text in _range_faults(self)]:
            raise ConfigError("these options cannot be used", faults)


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


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Which one."""
    lr: float = 3e-3
    """Learning rate after the warm-up."""
    beta1: float = 0.9
    """AdamW: decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW: decay of the mean of squared gradients."""
    eps: float = 1e-8
    """AdamW: added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
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
    sequences: int = 64
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
    seq: int = 256
    """Tokens per sequence."""
    steps: int = 400
    """Steps of the whole run."""
    data: str | None = None
    """File or folder of the corpus; None takes the default corpus."""
    run_dir: str | None = None
    """Folder for checkpoints and metrics; None writes none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes CUDA where it can."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The learning rate over the steps."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """The validation loss."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """The text that is generated at the end."""
    progress: bool = True
    """Show a progress bar on a terminal."""


Config = TypeVar("Config", bound=ProgramConfig)

_Rule = tuple[Callable[[Any], bool], str]
_POSITIVE: _Rule = (lambda value: value >= 1, "at least 1")
_NOT_NEGATIVE: _Rule = (lambda value: value >= 0, "0 or more")
_ABOVE_0: _Rule = (lambda value: value > 0, "above 0")
_BELOW_1: _Rule = (lambda value: 0 <= value < 1, "at least 0 and below 1")
_TO_1: _Rule = (lambda value: 0 <= value <= 1, "from 0 to 1")
_SEED: _Rule = (lambda value: 0 <= value < 2**63, "from 0 to 2**63 - 1")
_NAME: _Rule = (lambda value: bool(value.strip()), "a name")

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(["batch", "seq", "micro_batches", "layers", "evaluation.sequences"], _POSITIVE),
    **dict.fromkeys(["steps", "z_loss", "evaluation.every", "sample.tokens"], _NOT_NEGATIVE),
    **dict.fromkeys(["sample.temperature", "optimizer.weight_decay", "optimizer.clip_norm"], _NOT_NEGATIVE),
    **dict.fromkeys(["schedule.warmup_steps", "schedule.decay_steps"], _NOT_NEGATIVE),
    **dict.fromkeys(["optimizer.lr", "optimizer.eps"], _ABOVE_0),
    **dict.fromkeys(
        ["label_smoothing", "optimizer.beta1", "optimizer.beta2", "optimizer.momentum"], _BELOW_1
    ),
    "schedule.final_fraction": _TO_1,
    "seed": _SEED,
    **dict.fromkeys(["model", "plan"], _NAME),
}
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = "tag:yaml.org,2002:null"


def _range_faults(config: ProgramConfig) -> list[tuple[str, str]]:
    """(place, text) of every value out of its range."""
    faults = []
    for place in _places(type(config)):
        value: Any = config
        for name in place.split("."):
            value = getattr(value, name)
        if isinstance(value, float) and not math.isfinite(value):
            faults.append((place, f"{place} is {value}: must be finite"))
        elif place in _RULES and value is not None and not _RULES[place][0](value):
            faults.append((place, f"{place} is {value!r}: must be {_RULES[place][1]}"))
    parts, batch = config.micro_batches, config.batch
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
    return faults


def parse(kind: type[Config], argv: list[str], prog: str, description: str) -> Config:
    """The configuration of a command.

    Args:
        kind: Its class.
        argv: Its arguments, without the program's name. `--config FILE.yaml` may stand anywhere.
        prog, description: For `--help`, which prints and exits with 0.

    Raises:
        ConfigError: Every fault of the file, of the command line, and every value out of range.
    """
    if any(argument in ("-h", "--help") for argument in argv):
        text = f"{description}\n\n--config FILE.yaml reads values from a file; options override them."
        _run_tyro(kind(), ["--help"], prog, text)
    places = _places(kind)
    given, path, faults = _read_arguments(argv, places)
    values, file_faults = _read_file(path, places) if path is not None else ({}, [])
    faults = file_faults + faults
    # Ranges are checked where a value could be read, so that one answer shows everything.
    skip = {place for place, _ in faults}
    skip |= {"micro_batches"} if "batch" in skip else set()
    merged = _build(kind, {**values, **given})
    faults += [(place, text) for place, text in _range_faults(merged) if place not in skip]
    if faults:
        raise ConfigError("these options cannot be used", [text for _, text in faults])
    options = [_as_option(place, value, places[place]) for place, value in given.items()]
    return _run_tyro(_build(kind, values), options, prog, description)


def dump(config: ProgramConfig) -> str:
    """YAML with every value; `parse` with it as `--config` gives an equal object."""
    import yaml

    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


# Fields by their place, such as "optimizer.lr"


def _places(kind: type) -> dict[str, Any]:
    """The type of every value by its place."""
    places: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            places |= {f"{name}.{inner}": each for inner, each in _places(typing.cast(type, hint)).items()}
        else:
            places[name] = hint
    return places


def _build(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """The defaults of a class with the values at their places."""
    config = kind()
    for place, value in values.items():
        group, _, name = place.rpartition(".")
        if group:
            name, value = group, dataclasses.replace(getattr(config, group), **{name: value})
        config = dataclasses.replace(config, **{name: value})
    return config


def _similar(place: str, places: Iterable[str], show: Callable[[str], str]) -> str:
    """A hint ' (did you mean ...?)': the same name elsewhere, or near names of the same group."""
    group, _, name = place.rpartition(".")
    found = [known for known in places if known.rpartition(".")[2] == name]
    if not found:
        prefix = f"{group}." if group else ""
        here = {known.removeprefix(prefix).partition(".")[0] for known in places if known.startswith(prefix)}
        found = [prefix + near for near in difflib.get_close_matches(name, sorted(here), cutoff=0.6)]
    return f" (did you mean {' or '.join(map(show, found))}?)" if found else ""


# One value from its text


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A type without `| None`, and whether that was there."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        return next(each for each in get_args(hint) if each is not type(None)), True
    return hint, False


def _expected(hint: Any) -> str:
    base, optional = _without_none(hint)
    if get_origin(base) is Literal:
        text = f"one of {', '.join(map(str, get_args(base)))}"
    else:
        text = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[base]
    return f"{text} or none" if optional else text


def _from_text(text: str, hint: Any) -> Any:
    """The value; raises `ValueError` if the text has another type."""
    base, _ = _without_none(hint)
    if get_origin(base) is Literal:
        return next(iter([each for each in get_args(base) if str(each) == text] or [_refuse(text)]))
    if base is bool:
        return _BOOLEANS[text.lower()] if text.lower() in _BOOLEANS else _refuse(text)
    if base is int and not re.fullmatch(r"[+-]?(0|[1-9]\d*(_\d+)*)", text):
        _refuse(text)  # YAML would read 010 as 8 and 1:30 as 90
    return base(text)


def _refuse(text: str) -> Any:
    raise ValueError(text)


# The command line


def _option(place: str) -> str:
    return "--" + place.replace("_", "-")


def _as_option(place: str, value: Any, hint: Any) -> str:
    if hint is bool:
        return _option(place) if value else _option(f"no_{place}")
    return f"{_option(place)}={value}"


def _read_arguments(
    argv: Iterable[str], places: Mapping[str, Any]
) -> tuple[dict[str, Any], str | None, list[tuple[str, str]]]:
    """Values by place, the path of `--config`, (place, text) of every fault: tyro stops at the first."""
    values: dict[str, Any] = {}
    paths: list[str] = []
    faults: list[tuple[str, str]] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        place = name.removeprefix("--").replace("-", "_")
        flag = place.removeprefix("no_")
        hint = str if place == "config" else places.get(place)
        if not argument.startswith("--"):
            faults.append(("", f"{argument!r}: unexpected argument; options start with --"))
        elif places.get(flag) is bool:
            values[flag] = flag == place
            if equals:
                faults.append(
                    (flag, f"{name} takes no value: write {_option(flag)} or {_option(f'no_{flag}')}")
                )
        elif hint is None:
            # Its value, if that is what follows, is part of the same fault.
            if not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
            faults.append((place, f"{name}: unknown option{_similar(place, [*places, 'config'], _option)}"))
        elif not equals and (not rest or rest[0].startswith("--")):
            expected = "a YAML file" if place == "config" else _expected(hint)
            faults.append((place, f"{name}: a value is missing: expected {expected}"))
        else:
            text = text if equals else rest.pop(0)
            if place == "config":
                paths.append(text)
            elif _without_none(hint)[1] and text.lower() in ("none", "null"):
                values[place] = None
            else:
                try:
                    values[place] = _from_text(text, hint)
                except ValueError:
                    faults.append((place, f"{name} is {text!r}: expected {_expected(hint)}"))
    if len(paths) > 1:
        faults.append(("config", f"--config is given {len(paths)} times ({', '.join(paths)}): give one file"))
    return values, paths[0] if len(paths) == 1 else None, faults


def _run_tyro(defaults: Config, options: list[str], prog: str, description: str) -> Config:
    import tyro

    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(
                type(defaults), args=options, default=defaults, prog=prog, description=description
            )
    except SystemExit as end:
        if not end.code:
            raise
        words = re.sub(r"[^\x00-\x7f]+", " ", shown.getvalue()).split()  # without the frame around it
        raise ConfigError("these options cannot be used", [" ".join(words)]) from None


# The file


def _read_file(path: str, places: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Values by place, and (place, text) of every fault; from YAML's nodes, which know text and line."""
    import yaml

    values: dict[str, Any] = {}
    faults: list[tuple[str, str]] = []
    groups = {place.partition(".")[0] for place in places if "." in place}

    def fault(node: Any, place: str, text: str) -> None:
        faults.append((place, f"{path}:{node.start_mark.line + 1}: {text}"))

    def read_mapping(node: Any, prefix: str) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                fault(key, f"{prefix}{key.value}", f"{prefix}{key.value} is given twice")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        loader.flatten_mapping(node)  # <<: *name
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                fault(key, prefix, "a key must be the name of an option")
                continue
            place = prefix + key.value.replace("-", "_")
            if place in groups and isinstance(value, yaml.MappingNode):
                read_mapping(value, f"{place}.")
            elif place in groups:
                if value.tag != _NULL:
                    fault(value, place, f"{place} is {describe(value)}: expected a mapping of options")
            elif place not in places:
                fault(key, place, f"{prefix}{key.value}: unknown key{_similar(place, places, str)}")
            else:
                read_value(value, place)

    def read_value(node: Any, place: str) -> None:
        hint = places[place]
        base, optional = _without_none(hint)
        try:
            if node.tag == _NULL:
                values[place] = None if optional else _refuse("null")
            elif not isinstance(node, yaml.ScalarNode) or (
                node.style is not None and base in (int, float, bool)
            ):
                _refuse("quoted, or not a scalar")
            else:
                # The text, not YAML's own reading: for YAML 3e-4 is text, and the word no is false.
                values[place] = _from_text(node.value, hint)
        except ValueError:
            fault(node, place, f"{place} is {describe(node)}: expected {_expected(hint)}")

    def describe(node: Any) -> str:
        if isinstance(node, yaml.ScalarNode):
            return (
                "null"
                if node.tag == _NULL
                else f"the text {node.value!r}"
                if node.style
                else repr(node.value)
            )
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"

    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file.read())
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            read_mapping(root, "")
        elif root is not None and root.tag != _NULL:
            fault(root, "", f"the file is {describe(root)}: expected a mapping of options")
    except OSError as error:
        faults.append(("", f"{path}: cannot be read ({error.strerror})"))
    except UnicodeDecodeError:
        faults.append(("", f"{path}: is not UTF-8 text"))
    except RecursionError:
        faults.append(("", f"{path}: is nested too deeply"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        faults.append(("", f"{path}:{line}: invalid YAML: {error.problem}"))
    except yaml.YAMLError as error:
        faults.append(("", f"{path}: invalid YAML: {str(error).splitlines()[0]}"))
    return values, faults
