"""Whether a table runs, found out in a way that owes nothing to the checker, and tables with small changes."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from dtensor_lm.schedules.library import KNOWN, evaluation, generate
from dtensor_lm.schedules.table import Action, Schedule

# Every rank is a coroutine with its own memory; tensors travel in mailboxes


class Wrong(Exception):
    """A rank was told to use what it does not have, or to do something twice."""


def rank_of(table: Schedule, rank: int, mail: dict[tuple[str, int, int], deque[Any]], sums: Counter[Any]) -> Iterator:
    """Runs one rank. Yields where it waits for a message; a tensor is a text that says how it was made."""
    mine = [stage for stage, owner in enumerate(table.placement) if owner == rank]
    memory: dict[Any, Any] = {}
    losses: list[Any] = []
    last = len(table.placement) - 1

    def take(key: Any) -> Any:
        if key not in memory:
            raise Wrong(key)
        return memory.pop(key)

    def give(kind: str, stage: int, micro_batch: int, value: Any) -> None:
        if stage in mine:
            memory[kind, stage, micro_batch] = value
        else:
            mail.setdefault((kind, stage, micro_batch), deque()).append(value)

    for stage, kind, i in table.rows[rank]:
        if stage not in mine or not 0 <= i < table.micro_batches:
            raise Wrong(stage)
        incoming = {"F": ("x", stage - 1), "B": ("g", stage + 1), "I": ("g", stage + 1), "W": ("", -1)}[kind]
        value = None
        if 0 <= incoming[1] <= last:
            key = (incoming[0], stage, i)
            if incoming[1] in mine:
                value = take(key)
            else:
                while not mail.get(key):
                    yield
                value = mail[key].popleft()
        if kind == "F":
            if ("F", stage, i) in sums:
                raise Wrong("twice")
            sums["F", stage, i] += 1
            output = i if stage == 0 else value
            if output != i:
                raise Wrong("another micro-batch")
            memory["saved", stage, i] = output
            if stage == last:
                losses.append(i)
            else:
                give("x", stage + 1, i, output)
        elif not table.training:
            raise Wrong("a backward in an evaluation")
        elif kind in "BI":
            saved = take(("saved", stage, i))
            gradient = losses[i] if stage == last and i < len(losses) else value
            if saved != i or gradient != i:
                raise Wrong("a gradient of another micro-batch")
            if stage > 0:
                give("g", stage - 1, i, gradient)
            if kind == "B":
                sums["W", stage, i] += 1
            else:
                memory["half", stage, i] = i
        else:
            take(("half", stage, i))
            sums["W", stage, i] += 1


def runs(table: Schedule, seed: int = 0) -> bool:
    """Whether all ranks come to their end with every gradient added once."""
    mail: dict[tuple[str, int, int], deque[Any]] = {}
    sums: Counter[Any] = Counter()
    ranks = [rank_of(table, rank, mail, sums) for rank in range(len(table.rows))]
    alive = list(range(len(ranks)))
    chance = random.Random(seed)
    quiet = 0
    while alive and quiet < 50 * len(ranks):
        rank = chance.choice(alive)
        before = (sum(sums.values()), sum(map(len, mail.values())))
        try:
            next(ranks[rank])
        except StopIteration:
            alive.remove(rank)
        except Wrong:
            return False
        quiet = 0 if (sum(sums.values()), sum(map(len, mail.values()))) != before else quiet + 1
    kinds = "FW" if table.training else "F"
    wanted = {(k, s, i) for k in kinds for s in range(len(table.placement)) for i in range(table.micro_batches)}
    return not alive and sums == Counter(wanted) and not any(mail.values())


# Corruptions


def corrupt(table: Schedule, chance: random.Random) -> Schedule:
    """One small change of one or two rows, of a kind drawn by chance."""
    rows = [list(actions) for actions in table.rows]
    line = chance.choice([each for each in rows if each])
    here, there = chance.randrange(len(line)), chance.randrange(len(line))
    action = line[here]
    kind = chance.choice(["drop", "double", "move", "swap", "far", "exchange", "split", "merge", "other", "rank"])
    if kind == "drop":
        del line[here]
    elif kind == "double":
        line.insert(there, action)
    elif kind == "move":
        line.insert(there, line.pop(here))
    elif kind == "swap" and here + 1 < len(line):
        line[here], line[here + 1] = line[here + 1], line[here]
    elif kind == "far":
        line[here], line[there] = line[there], line[here]
    elif kind == "exchange":  # the same stage and kind, another micro-batch: what makes ranks wait for each other
        same = [place for place, each in enumerate(line) if each[:2] == action[:2]]
        there = chance.choice(same)
        line[here], line[there] = line[there], line[here]
    elif kind == "split" and action.kind == "B":
        line[here] = action._replace(kind="I")
        line.insert(chance.randrange(len(line) + 1), action._replace(kind="W"))
    elif kind == "merge" and action.kind == "I":
        line[here] = action._replace(kind="B")
        if chance.random() < 0.7 and action._replace(kind="W") in line:
            line.remove(action._replace(kind="W"))
    elif kind == "other":
        line[here] = Action(
            max(0, action.stage + chance.choice([-1, 0, 0, 1])), chance.choice("FBIW"), action.micro_batch
        )
    elif kind == "rank":
        chance.choice(rows).append(line.pop(here))
    return Schedule(table.name, table.placement, table.micro_batches, tuple(map(tuple, rows)), table.training)


def drawn(chance: random.Random) -> Schedule:
    kind = chance.choice(list(KNOWN))
    p = chance.randint(1, 4)
    m = chance.randint(2 * p, 2 * p + 2) if kind == "dualpipe-v" else chance.choice([1, 2, p, 2 * p])
    table = generate(kind, p, m, None if chance.random() < 0.7 else KNOWN[kind][2] or chance.randint(1, 3))
    return evaluation(table.placement, m) if chance.random() < 0.1 else table
