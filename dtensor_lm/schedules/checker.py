"""Whether a table can be run, and what it keeps in memory.

    check(schedule)          # or one ScheduleError with every fault
    peaks(schedule)          # activations and open gradients that each rank holds at once

How `torch.distributed.pipelining` executes a table (`_PipelineScheduleRuntime`, torch 2.11 to 2.13). First it adds the
communication, on every rank alike: it goes through the rows in turn and takes the next action of a rank once its
inputs are there. Behind an F whose next stage is on another rank, and behind a B or I whose previous stage is, it puts
a send, and at the same moment a receive at the end of what it has so far for the other rank. So any two ranks have
their sends and receives in the same order. When it runs, sends and receives are posted without waiting; a rank waits
only where an action needs what a receive brings, and for its sends at the end of the step. Stages side by side on one
rank hand tensors over without either. Idle cells of a table do nothing.

Hence a table hangs nowhere if all its actions, of all ranks together, have *some* order that keeps each row and puts
everything behind what it needs: in that order every receive is matched at once, even if sends were to wait for their
receives. And without such an order the engine cannot place the communication: that is the deadlock named here.

The engine itself counts distinct actions and looks no further: one that is there twice ends the step half way, or is
done twice. A last stage whose forwards do not ascend (it takes the loss of micro-batch i from the i-th forward) gives
wrong gradients with an exact loss in torch 2.13, and ends the step in 2.11.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from dtensor_lm.errors import ScheduleError
from dtensor_lm.schedules.table import KINDS, Action, Schedule


class Peak(NamedTuple):
    """The most that a rank holds at once, in pairs of a stage and a micro-batch.

    activations: from an F to its B or I. gradients: from an I to its W, with the activations that W needs. held: both
    together, from an F to its B or W. An evaluation holds nothing.
    """

    activations: int
    gradients: int
    held: int


def check(schedule: Schedule) -> None:
    """Raises `ScheduleError` with every fault of a table that cannot be run."""
    if found := faults(schedule):
        raise ScheduleError(f"the schedule {schedule.name} cannot be run:", found)


def faults(schedule: Schedule) -> list[str]:
    """Why a table cannot be run, naming the actions; empty if it is sound."""
    owners = set(schedule.placement)
    if schedule.micro_batches < 1 or not owners or owners != set(range(schedule.ranks)):
        return [
            f"{schedule.ranks} rows, {schedule.micro_batches} micro-batches and stages on ranks {sorted(owners)}: "
            "each rank needs a row and at least one stage, and there must be at least one micro-batch"
        ]
    actions, pairs = sum(map(len, schedule.rows)), schedule.stages * schedule.micro_batches
    if 2 * actions < pairs:  # most are missing: naming each one would take long and tell little
        return [
            f"{schedule.stages} stages and {schedule.micro_batches} micro-batches, but only {actions} actions: each "
            "stage needs a forward, and a backward in a training, for each micro-batch"
        ]
    return [*_each_once(schedule), *_rows(schedule), *_last_stage(schedule), *_deadlocks(schedule)]


def in_order(schedule: Schedule) -> tuple[list[tuple[int, Action]], dict[int, tuple[Action, Action]]]:
    """Executes a table without time.

    Returns (rank, action) in an order in which everything follows what it needs from other ranks, and for each rank
    that gets stuck (the action where it stands, the action of another rank that it waits for).
    """
    done: set[Action] = set()
    order: list[tuple[int, Action]] = []
    stands = [0] * schedule.ranks
    waiting: dict[Action, list[int]] = defaultdict(list)
    stuck: dict[int, tuple[Action, Action]] = {}
    runnable = list(range(schedule.ranks))[::-1]
    while runnable:
        rank = runnable.pop()
        for action in schedule.rows[rank][stands[rank] :]:
            missing = [each for each in schedule.needs(action) if each not in done and _elsewhere(schedule, each, rank)]
            if missing:
                stuck[rank] = (action, missing[0])
                waiting[missing[0]].append(rank)
                break
            order.append((rank, action))
            done.add(action)
            stands[rank] += 1
            for woken in waiting.pop(action, ()):
                del stuck[woken]
                runnable.append(woken)
    return order, stuck


def peaks(schedule: Schedule) -> tuple[Peak, ...]:
    """What each rank holds at most. It follows from the rows alone: no durations change it."""
    return tuple(_peak(schedule, rank) for rank in range(schedule.ranks))


def _peak(schedule: Schedule, rank: int) -> Peak:
    activations = gradients = 0
    most = [0, 0, 0]
    for _, kind, _ in schedule.rows[rank] if schedule.training else ():
        activations += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
        gradients += {"F": 0, "B": 0, "I": 1, "W": -1}[kind]
        most = [max(pair) for pair in zip(most, (activations, gradients, activations + gradients), strict=True)]
    return Peak(*most)


def _elsewhere(schedule: Schedule, action: Action, rank: int) -> bool:
    """Whether another rank does it; what a row has in the wrong order or nobody does is another fault."""
    return schedule.places.get(action, (rank, 0))[0] != rank


def _each_once(schedule: Schedule) -> Iterator[str]:
    counts = Counter(action for actions in schedule.rows for action in actions)
    for rank, actions in enumerate(schedule.rows):
        for action in dict.fromkeys(actions):
            stage, kind, micro_batch = action
            if kind not in KINDS:
                yield f"rank {rank}: {action}: there is no kind {kind!r}, use {', '.join(KINDS)}"
            elif not 0 <= stage < schedule.stages:
                yield f"rank {rank}: {action}: there is no stage {stage}, the last is {schedule.stages - 1}"
            elif not 0 <= micro_batch < schedule.micro_batches:
                yield (
                    f"rank {rank}: {action}: there is no micro-batch {micro_batch}, "
                    f"the last is {schedule.micro_batches - 1}"
                )
            elif schedule.placement[stage] != rank:
                owner = schedule.placement[stage]
                yield f"rank {rank}: {action}: stage {stage} is on rank {owner}, move it there"
            elif kind != "F" and not schedule.training:
                yield f"rank {rank}: {action}: an evaluation has forwards only, leave it out"
    for action, count in counts.items():
        if count > 1:
            yield f"{action} is there {count} times: leave one"
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            yield from _of_one(schedule, stage, micro_batch, counts)


def _of_one(schedule: Schedule, stage: int, micro_batch: int, counts: Counter[Action]) -> Iterator[str]:
    """What one stage must do with one micro-batch: F, and either B, or I and W."""
    forward, whole, first, second = (Action(stage, kind, micro_batch) for kind in "FBIW")
    rank = schedule.placement[stage]
    if not counts[forward]:
        yield f"{forward} is missing: add it to rank {rank}"
    if not schedule.training:
        return
    if counts[whole] and (counts[first] or counts[second]):
        halves = " and ".join(str(each) for each in (first, second) if counts[each])
        yield f"{whole} is there beside {halves}: a backward is whole or split, leave out one of the two"
    elif not counts[whole] and not counts[first] and not counts[second]:
        yield f"the backward of stage {stage} for micro-batch {micro_batch} is missing: add {whole} to rank {rank}"
    elif not counts[whole] and not (counts[first] and counts[second]):
        lost, there = (second, first) if counts[first] else (first, second)
        yield f"{lost} is missing beside {there}: add it to rank {rank}"


def _rows(schedule: Schedule) -> Iterator[str]:
    """Actions that stand before what they need in the row of their own rank."""
    for rank, actions in enumerate(schedule.rows):
        for position, action in enumerate(actions):
            for need in schedule.needs(action):
                owner, there = schedule.places.get(need, (rank, -1))
                if owner == rank and there > position and schedule.places[action] == (rank, position):
                    yield f"rank {rank}: {action} stands before {need}, which it needs: move it behind"


def _last_stage(schedule: Schedule) -> Iterator[str]:
    last = schedule.stages - 1
    forwards = [action for action in schedule.rows[schedule.placement[last]] if action[:2] == (last, "F")]
    for before, after in pairwise(forwards):
        if schedule.training and after.micro_batch < before.micro_batch:
            yield (
                f"{after} stands behind {before}: forwards of the last stage must ascend, the engine takes the loss of "
                "micro-batch i from the i-th of them"
            )


def _deadlocks(schedule: Schedule) -> Iterator[str]:
    """One text for each circle of ranks that wait for each other."""
    _, stuck = in_order(schedule)
    next_of = {rank: schedule.places[missing][0] for rank, (_, missing) in stuck.items()}
    seen: set[int] = set()
    for rank in stuck:
        path: list[int] = []
        while rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = next_of[rank]
        if rank in path:  # otherwise it waits for a circle that is already named
            circle = path[path.index(rank) :]
            parts = [f"rank {each} stands at {stuck[each][0]} and waits for {stuck[each][1]}" for each in circle]
            owner, wanted = next_of[circle[0]], stuck[circle[0]][1]
            yield f"deadlock: {'; '.join(parts)}: on rank {owner}, move {wanted} before {stuck[owner][0]}"
