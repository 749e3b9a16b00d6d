"""What each rank of `train` and `check` runs, and what is found before any rank starts."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from dtensor_lm import process_groups
from dtensor_lm.config import CheckConfig, ProgramConfig, TrainConfig
from dtensor_lm.from_config import program_of


def validate(config: ProgramConfig) -> None:
    """Raises every fault of model, plan, mesh and data that needs no process."""
    program = program_of(config)
    if isinstance(config, TrainConfig):
        from dtensor_lm.training.loop import check_run_dir, feed_of

        check_run_dir(config.run_dir)
        feed_of(config, program)


def train(config: TrainConfig) -> int:
    from dtensor_lm.training.loop import run

    return run(config)


def check(config: CheckConfig) -> int:
    """Compares with one device; prints the report on rank 0. Returns 0 if the mesh is right, else 1."""
    from dtensor_lm.testing.equivalence import compare

    process_groups.start(process_groups.device("cpu"))
    program = program_of(config)
    report = compare(program, seed=config.seed, steps=config.steps)
    if dist.get_rank() == 0:
        about = {"model": config.model, "mesh": config.mesh, "plan": config.plan, "zero": config.zero,
                 "dtype": config.dtype, "batch": program.batch, "seq": program.seq,
                 "micro_batches": program.micro_batches, "steps": config.steps}  # fmt: skip
        if (pipe := program.pipeline) is not None:
            about |= {
                "schedule": pipe.schedule.name,
                "layers_per_stage": ",".join(str(stage.layers) for stage in pipe.stages),
            }
        if config.json:
            print(json.dumps({**report.as_dict(), **about}))
        else:
            what = (
                f"within {report.tolerance:g}" if config.dtype == "float64" else f"within the bounds of {config.dtype}"
            )
            said = f"{'' if report.ok else 'NOT '}equal to one device {what}"
            print(f"{said}: {config.model} on mesh {config.mesh or '(one process)'}")
            rows = {**report.as_dict(), "bytes": f"{report.bytes} per rank in a step", **about}
            print("\n".join(f"  {key:22} {value}" for key, value in rows.items()))
            if not report.ok:
                print(f"is a signature wrong? dtensor-lm check --regions --model {config.model} says which")
        sys.stdout.flush()
    return 0 if report.ok else 1
