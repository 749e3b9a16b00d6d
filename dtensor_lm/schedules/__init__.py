"""Pipelines as tables: the known ones, one's own, whether they are sound, what they cost, and how they look.

Nothing here imports torch or runs anything: a table is data.
"""

from dtensor_lm.schedules.checker import Peak, check, faults, peaks
from dtensor_lm.schedules.library import KNOWN, evaluation, generate
from dtensor_lm.schedules.simulator import Durations, Span, Timeline, simulate
from dtensor_lm.schedules.table import Action, Schedule, loop, row, vee
from dtensor_lm.schedules.table_file import from_csv, read, to_csv, write

__all__ = [
    "KNOWN",
    "Action",
    "Durations",
    "Peak",
    "Schedule",
    "Span",
    "Timeline",
    "check",
    "evaluation",
    "faults",
    "from_csv",
    "generate",
    "loop",
    "peaks",
    "read",
    "row",
    "simulate",
    "to_csv",
    "vee",
    "write",
]
