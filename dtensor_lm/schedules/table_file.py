"""Tables as CSV files, as torch's engine reads them: a line for each rank, a cell for each action, empty where idle.

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1

Empty cells are for people: `to_csv` puts actions that can be done at the same moment into one column. Reading drops
them. Everything else follows from the cells: a stage is on the rank whose line names it, and a table without a backward
is an evaluation. `from_csv` sees what cannot be read; whether the table is sound is `checker`'s question.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from dtensor_lm.errors import ScheduleError
from dtensor_lm.schedules.checker import in_order
from dtensor_lm.schedules.table import Action, Row, Schedule

_OVERLAPPED = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
_OF_THE_ENGINE = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")


def read(path: str) -> Schedule:
    """The table of a CSV file, named after it; raises `ScheduleError` with every cell that cannot be read."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise ScheduleError(f"the table {path} cannot be read: {reason}") from None
    return from_csv(text, Path(path).stem)


def write(schedule: Schedule, path: str) -> None:
    """Writes the table of a schedule; raises `ScheduleError` where the file cannot be written."""
    try:
        Path(path).write_text(to_csv(schedule))
    except OSError as error:
        raise ScheduleError(f"the table {path} cannot be written: {error.strerror}") from None


def from_csv(text: str, name: str = "table") -> Schedule:
    """The table that a text of CSV says.

    A pair that may overlap, `(0F3;3B1)OVERLAP_F_B`, is read as its two actions, one after the other: so the engine
    executes it too.

    Raises:
        ScheduleError: Every fault, with its row and column, counted from 1.
    """
    try:
        cells = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"the table {name} is not CSV: {error}") from None
    rows: list[Row] = []
    faults: list[str] = []
    owners: dict[int, int] = {}
    for number, line in enumerate(cells, 1):
        actions: list[Action] = []
        for column, cell in enumerate(line, 1):
            place = f"row {number}, column {column}"
            try:
                found = _actions(cell.strip())
            except ValueError as error:
                faults.append(f"{place}: {cell!r} {error}")
                continue
            for action in found:
                owner = owners.setdefault(action.stage, number)
                if owner != number:
                    faults.append(
                        f"{place}: {cell!r} is of stage {action.stage}, which row {owner} has too: a stage is on one "
                        "rank, move all its actions there"
                    )
            actions += found
        if not any(cell.strip() for cell in line):
            faults.append(f"row {number} is empty: each rank needs a row with actions, remove the row or fill it")
        rows.append(tuple(actions))
    actions = [action for each in rows for action in each]
    if not faults:
        faults += _gaps("stages", {action.stage for action in actions})
        faults += _gaps("micro-batches", {action.micro_batch for action in actions})
    if not cells:
        faults.append("it is empty: write a row for each rank, such as 0F0,0B0")
    if faults:
        raise ScheduleError(f"the table {name} cannot be read:", faults)
    return Schedule(
        name,
        placement=tuple(owners[stage] - 1 for stage in sorted(owners)),
        micro_batches=1 + max(action.micro_batch for action in actions),
        rows=tuple(rows),
        training=any(action.kind != "F" for action in actions),
    )


def to_csv(schedule: Schedule) -> str:
    """The table as CSV. Idle cells show how the ranks wait for each other where every action takes as long."""
    order, stuck = in_order(schedule)
    if stuck:  # then no column is right
        lines = [list(map(str, actions)) for actions in schedule.rows]
    else:
        lines = [[] for _ in schedule.rows]
        column: dict[Action, int] = {}
        for rank, action in order:
            after = [column[each] + 1 for each in schedule.needs(action) if each in column]
            column[action] = max([len(lines[rank]), *after])
            lines[rank] += [""] * (column[action] - len(lines[rank])) + [str(action)]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def _actions(text: str) -> list[Action]:
    """The actions of a cell, or `ValueError` with what is wrong with it."""
    if not text:
        return []
    if _OF_THE_ENGINE.fullmatch(text):
        raise ValueError("is added by the engine: leave out everything but F, B, I and W")
    pair = _OVERLAPPED.fullmatch(text)
    try:
        return [Action.parse(each.strip()) for each in (pair.groups() if pair else [text])]
    except ValueError:
        raise ValueError("is not an action: write stage, kind (F, B, I or W) and micro-batch, such as 3F0") from None


def _gaps(what: str, numbers: set[int]) -> Iterator[str]:
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if missing < len(numbers):
        yield f"{what} go up to {max(numbers)}, but there is no {missing}: number them from 0 without gaps"
