"""From typed options to model, plan, mesh and Program."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from dtensor_lm import models
from dtensor_lm.config import CheckConfig, ProgramConfig, TrainConfig
from dtensor_lm.errors import ConfigError, UserError, nearest
from dtensor_lm.initial_values import abstract
from dtensor_lm.mesh import Mesh
from dtensor_lm.models.narrow import narrow, sizes
from dtensor_lm.models.own import own
from dtensor_lm.region import signature
from dtensor_lm.schedules import KNOWN, Schedule, generate, read
from dtensor_lm.sharding_plans import NAMED, Plan, named, standard
from dtensor_lm.sharding_plans.checks import LAYERS
from dtensor_lm.sharding_plans.plan_file import read_plan
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.sharding_plans.resolve import resolve
from dtensor_lm.sharding_plans.stages import default_micro_batches

MOST_LOCAL_RANKS = 64


def plan_of(config: ProgramConfig, whole_gradients: bool = False) -> Plan:
    """The plan by name, or from a YAML file. whole_gradients: of the standard plan."""
    if whole_gradients and config.plan == "standard" and config.zero == 2:
        raise ConfigError(
            f"--zero 2 shards gradients while they accumulate, and --schedule {config.schedule} splits backward in two "
            "halves, after which alone they can be reduced: use --zero 1 or 3, or a schedule that does not split"
        )
    if config.plan == "standard":
        return standard(config.zero, config.sequence_parallel, whole_gradients)
    faults = []
    if config.zero:
        faults.append(
            f"--zero {config.zero} changes the standard plan only; plan {config.plan!r} says itself what it shards"
        )
    if not config.sequence_parallel:
        faults.append(
            "--no-sequence-parallel changes the standard plan only; choose plan tp, or change res in your own"
        )
    if faults:
        raise ConfigError("these options cannot be used together", faults)
    if config.plan in NAMED:
        return named(config.plan)
    if not os.path.exists(config.plan):
        raise ConfigError(
            f"--plan {config.plan}: neither a plan{nearest(config.plan, NAMED)} nor a file; "
            f"plans are {', '.join(NAMED)}"
        )
    return read_plan(config.plan)


def _changes(config: ProgramConfig) -> dict[str, Any]:
    """What options say of a model's shape, where they say something."""
    named = {"layers": config.layers, "tied": config.tied, "dropout": config.dropout}
    losses = {"label_smoothing": config.label_smoothing, "z_loss": config.z_loss}
    return {n: v for n, v in named.items() if v is not None} | {n: v for n, v in losses.items() if v}


def is_own(config: ProgramConfig) -> bool:
    """Whether the model is named by its place, `package.module:function`."""
    return ":" in config.model


def model_of(config: ProgramConfig) -> nn.Module:
    """The model, on the meta device."""
    sequence = {} if config.seq is None else {"seq": config.seq}
    if is_own(config):
        return own(config.model, _changes(config), sequence)
    return models.build(config.model, **_changes(config), **sequence)


def narrow_model_of(config: ProgramConfig) -> tuple[nn.Module, dict[str, Any]]:
    """A narrow model of the same code and switches, and its sizes.

    A model of one's own is as wide as its function makes it, and says nothing of its sizes.
    """
    if is_own(config):
        return model_of(config), {}
    given = {n: v for n, v in (("layers", config.layers), ("seq", config.seq)) if v is not None}
    shape = narrow(models.config(config.model, **_changes(config)), **given)
    return abstract(lambda: models.FAMILIES[type(shape)](shape)), sizes(shape)


def schedule_of(config: ProgramConfig) -> str | Schedule | None:
    """The pipeline's schedule: its name, or the table of a CSV file."""
    if config.schedule is None or config.schedule in KNOWN:
        return config.schedule
    if not os.path.exists(config.schedule):
        raise ConfigError(
            f"--schedule {config.schedule}: neither a schedule{nearest(config.schedule, KNOWN)} nor a file; "
            f"schedules are {', '.join(KNOWN)}"
        )
    return read(config.schedule)


def _splits(schedule: str | Schedule | None) -> bool:
    """Whether a schedule has backwards in two halves."""
    if schedule is None:
        return False
    table = generate(schedule, 2, 4) if isinstance(schedule, str) else schedule
    return any(action.kind in "IW" for row in table.rows for action in row)


def program_of(config: ProgramConfig) -> Program:
    """The Program of a command. Raises the faults of model, plan and mesh together where they are independent."""
    mesh = Mesh.parse(config.mesh)
    faults: list[UserError] = []
    schedule = None
    try:
        schedule = schedule_of(config)
    except UserError as error:
        faults.append(error)
    try:
        plan = plan_of(config, _splits(schedule))
    except UserError as error:
        faults.append(error)
    try:
        model = model_of(config)
        model.to(getattr(torch, config.dtype))
    except UserError as error:
        faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ConfigError("these cannot be used:", [str(f) for f in faults])
    batch, seq = config.batch, config.seq
    known = getattr(getattr(model, "config", None), "seq", None)
    if isinstance(config, CheckConfig):
        data, stages = (mesh.product(plan.axes("compute", name)) for name in ("batch", LAYERS))
        micro = config.micro_batches or default_micro_batches(schedule, stages, config.accumulate)
        batch = batch or 2 * data * micro
        seq = seq or min(64, known or 64)
    elif seq is None and known is None:
        raise ConfigError(
            f"--seq is missing: --model {config.model} does not say how long its sequences are (config.seq)"
        )
    decay = config.optimizer.decay if isinstance(config, TrainConfig) else "matrices"
    program = resolve(model, plan, mesh, batch=batch, seq=seq, micro_batches=config.micro_batches,
                      dtype=config.dtype, decay=decay, schedule=schedule, virtual_stages=config.virtual_stages,
                      split=[int(n) for n in config.split.split(",")] if config.split else None,
                      accumulate=config.accumulate)  # fmt: skip
    if isinstance(config, CheckConfig | TrainConfig):
        _check_batches(config, program)
    return program


def _check_batches(config: ProgramConfig, program: Program) -> None:
    """Refuses a model that the batches of `check` and `train` do not fit."""
    faults = []
    if program.inputs.keys() != {"tokens", "labels"}:
        faults.append(f"its inputs are {', '.join(program.inputs)}: batches have tokens and labels")
    if not signature(program.model).single or program.output.shape:
        faults.append("it does not return one scalar: return the sum of the loss over tokens, '+batch +seq ='")
    if "vocab" not in program.sizes:
        faults.append("no dim is called vocab: give the table's rows this name, so that token ids are known to fit")
    if faults:
        raise ConfigError(f"--model {config.model} cannot be run on text:", faults)


def check_local(mesh: Mesh, launched: bool, device: str = "auto") -> None:
    """Refuses meshes that this machine alone cannot run."""
    if launched or mesh.size == 1:
        return
    if mesh.size > MOST_LOCAL_RANKS:
        raise ConfigError(
            f"mesh {mesh} has {mesh.size} ranks, too many to start on this machine (at most "
            f"{MOST_LOCAL_RANKS}): start it with torchrun or srun, or look at it with `dtensor-lm plan`"
        )
    from dtensor_lm import process_groups

    if process_groups.device(device).type != "cpu":
        found = torch.accelerator.device_count()
        if found < mesh.size:
            raise ConfigError(
                f"mesh {mesh} has {mesh.size} ranks but this machine has {found} accelerators: "
                f"use --device cpu, or a mesh of at most {found}"
            )
