"""From typed options to model, plan, mesh and Program."""

from __future__ import annotations

import os

import torch

from dtensor_lm import models
from dtensor_lm.config import CheckConfig, ProgramConfig, TrainConfig
from dtensor_lm.errors import ConfigError, UserError, nearest
from dtensor_lm.mesh import Mesh
from dtensor_lm.sharding_plans import NAMED, Plan, named, standard
from dtensor_lm.sharding_plans.plan_file import read_plan
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.sharding_plans.resolve import resolve

MOST_LOCAL_RANKS = 64


def plan_of(config: ProgramConfig) -> Plan:
    """The plan by name, or from a YAML file."""
    if config.plan == "standard":
        return standard(config.zero, config.sequence_parallel)
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


def program_of(config: ProgramConfig) -> Program:
    """The Program of a command. Raises the faults of model, plan and mesh together where they are independent."""
    mesh = Mesh.parse(config.mesh)
    faults: list[UserError] = []
    changes = {"layers": config.layers, "tied": config.tied, "seq": config.seq}
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        plan = plan_of(config)
    except UserError as error:
        faults.append(error)
    try:
        model = models.build(config.model, **given, label_smoothing=config.label_smoothing, z_loss=config.z_loss)
        model.to(getattr(torch, config.dtype))
    except UserError as error:
        faults.append(error)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ConfigError("plan and model cannot be used:", [str(f) for f in faults])
    batch, seq = config.batch, config.seq
    if isinstance(config, CheckConfig):
        ranks = mesh.product(plan.axes("compute", "batch"))
        batch = batch or 2 * ranks * config.micro_batches
        seq = seq or min(64, getattr(model.config, "seq", 64))
    decay = config.optimizer.decay if isinstance(config, TrainConfig) else "matrices"
    return resolve(model, plan, mesh, batch=batch, seq=seq, micro_batches=config.micro_batches,
                   dtype=config.dtype, decay=decay)  # fmt: skip


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
