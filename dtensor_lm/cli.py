"""The front door: `dtensor-lm train|plan|check|draw`. Imports the rest only when it is needed."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

USAGE = """usage: dtensor-lm COMMAND [options]

Training of language models where parallelism is data: a plan maps named dimensions to mesh axes.

commands:
  train    train a model on a corpus:   dtensor-lm train --mesh fsdp=2,tp=2 --steps 100
  plan     print every layout and collective of a mesh, without processes:
                                        dtensor-lm plan --model llama3-405b --mesh fsdp=128,tp=8
  check    prove that a mesh computes the same as one device:
                                        dtensor-lm check --mesh dp=2,fsdp=2,tp=2
           or that the signatures of a model are right:
                                        dtensor-lm check --regions --model my_model:build
  draw     draw a pipeline schedule, without processes:
                                        dtensor-lm draw schedule --kind zb-v --ranks 4 --micro-batches 8

`dtensor-lm COMMAND --help` lists the options. `--config FILE.yaml` reads them from a file.
Exit codes: 0 done, 1 a check said no or the run failed, 2 bad input.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        from dtensor_lm import __version__

        print(f"dtensor-lm {__version__}")
        return 0
    from dtensor_lm.errors import ConfigError, UserError, nearest

    try:
        if argv[0] not in _COMMANDS:
            raise ConfigError(f"unknown command {argv[0]!r}{nearest(argv[0], _COMMANDS)}: use {', '.join(_COMMANDS)}")
        return _COMMANDS[argv[0]](argv[1:])
    except UserError as error:
        # Under a launcher every rank finds the same fault: one of them says it.
        if "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") in ("0", ""):
            print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it once more at exit
        return 1
    except KeyboardInterrupt:
        print("interrupted: the run folder holds what was written until now", file=sys.stderr)
        return 130


def _prepare(mesh_text: str) -> int:
    """Sets the threads of each rank before anything imports torch; returns the number of ranks."""
    from dtensor_lm.launch import prepare_environment
    from dtensor_lm.mesh import Mesh

    world = Mesh.parse(mesh_text).size
    prepare_environment(world)
    return world


def _plan(argv: list[str]) -> int:
    from dtensor_lm.config import PlanConfig, parse

    config = parse(PlanConfig, argv, "dtensor-lm plan", "Print every layout and collective that follows from a plan.")
    _prepare("")
    from dtensor_lm.from_config import program_of

    program = program_of(config)
    print(json.dumps(program.as_dict(), indent=1) if config.json else program)
    return 0


def _check(argv: list[str]) -> int:
    from dtensor_lm.config import CheckConfig, parse

    config = parse(CheckConfig, argv, "dtensor-lm check", "Compare a mesh with one device, numerically.")
    if config.regions:
        _prepare("")
        from dtensor_lm.regions_command import check_regions

        return check_regions(config)
    return _launch(config, "check")


def _train(argv: list[str]) -> int:
    from dtensor_lm.config import TrainConfig, parse

    config = parse(TrainConfig, argv, "dtensor-lm train", "Train a model on a corpus.")
    from dtensor_lm.data import load_corpus

    load_corpus(config.data)  # a wrong path is said before torch is loaded
    return _launch(config, "train")


def _draw(argv: list[str]) -> int:
    from dtensor_lm.errors import ConfigError

    if argv[:1] != ["schedule"]:
        what = f"draw {argv[0]!r}: " if argv and not argv[0].startswith("-") else "draw what? "
        raise ConfigError(f"{what}there are drawings of schedules: dtensor-lm draw schedule --help")
    from dtensor_lm.schedules.command import draw_schedule

    return draw_schedule(argv[1:])


def _launch(config: Any, command: str) -> int:
    """Finds every fault that can be found before a process starts, then starts the ranks."""
    world = _prepare(config.mesh)
    from dtensor_lm.launch import launch, launcher_environment
    from dtensor_lm.mesh import Mesh

    launched = launcher_environment(os.environ) is not None
    if world > 1 and not launched:
        from dtensor_lm.launch import rank_threads
        from dtensor_lm.processes import start_forkserver

        start_forkserver(rank_threads())
    from dtensor_lm import commands, from_config

    from_config.check_local(Mesh.parse(config.mesh), launched, getattr(config, "device", "cpu"))
    commands.validate(config)
    code = launch(getattr(commands, command), config, world, mesh_text=config.mesh, json=config.json)
    if code in (130, 143):
        print("interrupted: the run folder holds what was written until now", file=sys.stderr)
    return code


_COMMANDS = {"train": _train, "plan": _plan, "check": _check, "draw": _draw}
