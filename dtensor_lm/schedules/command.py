"""`dtensor-lm draw schedule`: a known schedule, or one's own table, as text and as a picture."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dtensor_lm.config import parse
from dtensor_lm.errors import ConfigError
from dtensor_lm.schedules.drawing import draw
from dtensor_lm.schedules.library import KNOWN, evaluation, generate
from dtensor_lm.schedules.simulator import Durations, simulate
from dtensor_lm.schedules.svg import svg
from dtensor_lm.schedules.table import Schedule
from dtensor_lm.schedules.table_file import read, write

MOST_ACTIONS = 50_000  # of a drawing that can be looked at; beyond it only time and memory are lost


@dataclass(frozen=True, kw_only=True)
class DurationsConfig:
    """What each action takes, in any unit."""

    forward: float = 1.0
    """Forward of a stage."""
    backward: float = 2.0
    """Whole backward of a stage."""
    input_grad: float = 1.0
    """Gradient of the input of a stage."""
    weight_grad: float = 1.0
    """Gradients of the weights of a stage."""
    send: float = 0.0
    """From a rank to another."""


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """Options of `draw schedule`."""

    kind: Literal[
        "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zb-h1", "zb-v", "dualpipe-v"
    ] = "1f1b"
    """Name of a known schedule."""
    ranks: int = 4
    """Pipeline ranks."""
    stages: int | None = None
    """Stages of all ranks together, instead of ranks."""
    micro_batches: int = 8
    """Micro-batches of a step."""
    virtual_stages: int | None = None
    """Stages per rank; None as the schedule has it, 2 where it has a choice."""
    evaluation: bool = False
    """Only the forwards, for the same placement of stages."""
    file: str | None = None
    """A table of one's own, as CSV, instead of a known schedule."""
    csv: str | None = None
    """Also write the table to this file, as torch's engine reads it."""
    svg: str | None = None
    """Also write a picture to this file."""
    durations: DurationsConfig = field(default_factory=DurationsConfig)
    """What each action takes."""


def draw_schedule(argv: list[str]) -> int:
    """Prints the drawing and writes the files that were asked for. Returns 0.

    Raises:
        ConfigError, ScheduleError: Options or a table that cannot be used; nothing is printed or written then.
    """
    config = parse(DrawConfig, argv, "dtensor-lm draw schedule", "Draw a pipeline schedule.", more=_faults)
    schedule = _schedule(config)
    actions = sum(map(len, schedule.rows))
    if actions > MOST_ACTIONS:
        raise ConfigError(
            f"{actions:,} actions are too many to draw (at most {MOST_ACTIONS:,}): take fewer micro-batches"
        )
    timeline = simulate(schedule, Durations(**vars(config.durations)))
    tty = sys.stdout.isatty()
    text = draw(timeline, shutil.get_terminal_size().columns if tty else 200, tty and "NO_COLOR" not in os.environ)
    if config.svg is not None:
        try:
            Path(config.svg).write_text(svg(timeline))
        except OSError as error:
            raise ConfigError(f"the picture {config.svg} cannot be written: {error.strerror}") from None
    if config.csv is not None:
        write(schedule, config.csv)
    print(text)
    return 0


def _schedule(config: DrawConfig) -> Schedule:
    if config.file is not None:
        schedule = read(config.file)
    else:
        virtual = config.virtual_stages if config.virtual_stages is not None else KNOWN[config.kind][2] or 2
        ranks = config.ranks if config.stages is None else config.stages // virtual
        stages = ranks * virtual
        if stages * config.micro_batches > MOST_ACTIONS:  # said before so large a table is made
            raise ConfigError(
                f"{stages} stages and {config.micro_batches} micro-batches are too many to draw: their product may be "
                f"at most {MOST_ACTIONS:,}"
            )
        schedule = generate(config.kind, ranks, config.micro_batches, virtual)
    return evaluation(schedule.placement, schedule.micro_batches) if config.evaluation else schedule


def _faults(config: DrawConfig) -> list[tuple[str, str]]:
    """Options that were given and would do nothing, and durations that are none."""
    faults = []
    plain = DrawConfig()
    if config.stages is not None:
        per_rank = config.virtual_stages or KNOWN[config.kind][2] or 2
        if config.ranks != plain.ranks:
            faults.append(("ranks", "ranks would do nothing: stages is given"))
        if config.stages % per_rank or config.stages < 1:
            low = config.stages // per_rank * per_rank
            near = f"{low} or {low + per_rank}" if low else str(per_rank)
            text = f"stages is {config.stages}: {config.kind} has {per_rank} on each rank, use {near}"
            faults.append(("stages", text))
    for place in ("kind", "ranks", "stages", "micro_batches", "virtual_stages"):
        if config.file is not None and getattr(config, place) != getattr(plain, place):
            faults.append((place, f"{place} would do nothing: the table of {config.file} is drawn"))
    for place, value in vars(config.durations).items():
        if value and not 1e-9 <= value <= 1e9:
            faults.append((f"durations.{place}", f"durations.{place} is {value}: must be 0, or from 1e-9 to 1e9"))
    return faults
