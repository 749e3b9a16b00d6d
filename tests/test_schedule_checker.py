"""The checker says of a table what an executor written otherwise finds: whether it adds every gradient once."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_executor import corrupt, drawn, runs
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _PipelineScheduleRuntime

from dtensor_lm.errors import ScheduleError
from dtensor_lm.schedules.checker import Peak, check, faults, peaks
from dtensor_lm.schedules.library import KNOWN, evaluation, generate
from dtensor_lm.schedules.table import Action, Row, Schedule, loop, row, vee
from dtensor_lm.schedules.table_file import from_csv, to_csv
from dtensor_lm.testing.workers import WorkerError, pool


@pytest.mark.quick
def test_verdicts_of_corrupted_tables() -> None:
    """1,000 that do not run are refused, and whatever runs after a change is accepted."""
    chance = random.Random(0)
    counts: Counter[str] = Counter()
    while counts["unsound"] < 1000:
        table = drawn(chance)
        for _ in range(chance.choice([1, 1, 1, 2])):
            table = corrupt(table, chance) if any(table.rows) else table
        sound = runs(table, seed=chance.randrange(10**6))
        found = faults(table)
        assert sound == (not found), f"{table}\n{found}"
        deadlock = len(found) == 1 and found[0].startswith("deadlock")
        counts.update(["sound" if sound else "unsound", *(["deadlocks alone"] if deadlock else [])])
    assert counts["sound"] > 100 and counts["deadlocks alone"] > 20, counts


sizes = st.tuples(st.sampled_from(list(KNOWN)), st.integers(1, 6), st.integers(1, 3), st.integers(1, 20))


@pytest.mark.quick
@settings(deadline=None)
@given(sizes)
def test_every_known_schedule_is_sound(size: tuple[str, int, int, int]) -> None:
    kind, p, v, m = size
    try:
        table = generate(kind, p, m, v)
    except ScheduleError:
        return
    for each in (table, evaluation(table.placement, m)):
        assert faults(each) == [] and runs(each)
    held = [peak.held / table.virtual_stages for peak in peaks(table)]
    if kind in ("1f1b", "zb-h1", "zb-v"):  # the memory of 1F1B, whatever the number of micro-batches is
        assert max(held) <= p


def test_which_numbers_of_micro_batches_are_refused() -> None:
    """The generators accept every number of micro-batches where nothing in their order forbids it."""
    for kind in KNOWN:
        accepted = set()
        for m in range(1, 20):
            try:
                generate(kind, 3, m)
                accepted.add(m)
            except ScheduleError:
                pass
        refused = {"interleaved-1f1b": {7, 10, 11, 13, 14, 16, 17, 19}, "dualpipe-v": set(range(1, 6))}
        refused["interleaved-zero-bubble"] = refused["interleaved-1f1b"]
        assert set(range(1, 20)) - accepted == refused.get(kind, set())
    for kind in ("interleaved-1f1b", "interleaved-zero-bubble"):  # with one stage per rank there are no rounds
        assert not any(faults(generate(kind, 3, m, virtual_stages=1)) for m in range(1, 20))


def lowered(table: Schedule) -> bool:
    """Whether torch can place the sends and receives."""
    rows = {r: [_Action.from_str(str(each)) for each in actions] for r, actions in enumerate(table.rows)}
    try:
        _add_send_recv(rows, lambda stage: table.placement[stage], table.stages)
    except AssertionError as error:
        assert "can't schedule sends/recvs" in str(error)
        return False
    return True


@pytest.mark.quick
def test_deadlocks_are_the_tables_that_torch_cannot_lower() -> None:
    """Changes of order between forwards and backwards that leave every row right in itself."""
    chance = random.Random(1)
    counts: Counter[bool] = Counter()
    while min(counts[True], counts[False]) < 20:
        table = corrupt(drawn(chance), chance)
        if table.training and all(each.startswith("deadlock") for each in faults(table)):
            sound = not faults(table)
            assert lowered(table) == sound, table
            counts[sound] += 1


# What the engine does not see


def step_of_the_engine(csv: str, micro_batches: int) -> tuple[float, list[float]]:
    """A real step by a table: the sum of the losses on the last rank, and the gradient of this rank's weight."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    stage = PipelineStage(torch.nn.Linear(2, 2, bias=False).double(), rank, world, torch.device("cpu"))
    torch.nn.init.ones_(stage.submod.weight)
    engine = _PipelineScheduleRuntime(
        [stage], micro_batches, loss_fn=lambda y, t: ((y - t) ** 2).sum(), scale_grads=False
    )
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(csv)
        file.flush()
        engine._load_csv(file.name)
    x = torch.arange(2.0 * micro_batches, dtype=torch.float64).reshape(micro_batches, 2)
    losses: list[torch.Tensor] = []
    engine.step(*([x] if rank == 0 else []), target=x**2 if rank == world - 1 else None, losses=losses)
    return sum(loss.item() for loss in losses), stage.submod.weight.grad.flatten().tolist()


def test_the_engine_takes_tables_that_are_wrong() -> None:
    """Forwards of the last stage out of order leave the loss exact, and make gradients wrong; torch 2.11 sees it."""
    right = pool(2).run(step_of_the_engine, "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", 2)
    x = torch.arange(4.0, dtype=torch.float64).reshape(2, 2)
    weights = [torch.ones(2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    loss = ((x @ weights[0].t() @ weights[1].t() - x**2) ** 2).sum()
    loss.backward()
    assert right[1][0] == pytest.approx(loss.item(), abs=1e-9)
    assert [grads for _, grads in right] == [pytest.approx(w.grad.flatten().tolist(), abs=1e-9) for w in weights]
    for first, last in (("0F0,0F1,0B0,0B1", "1F1,1F0,1B0,1B1"), ("0F0,0F1,0B1,0B0", "1F1,1F0,1B1,1B0")):
        assert [each for each in faults(from_csv(f"{first}\n{last}\n")) if "must ascend" in each]
        try:
            wrong = pool(2).run(step_of_the_engine, f"{first}\n{last}\n", 2)
        except WorkerError as error:
            assert torch.__version__ < "2.13" and "has gradients None" in str(error)
        else:
            assert wrong[1][0] == pytest.approx(loss.item(), abs=1e-9)
            assert wrong[0][1] != pytest.approx(right[0][1], rel=1e-3)
    twice = pool(2).run(step_of_the_engine, "0F0,0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", 2)
    assert len(twice) == 2  # it comes to its end
    with pytest.raises(WorkerError, match="KeyError: 0"):
        pool(2).run(step_of_the_engine, "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B0,1B1\n", 2)


# What is said


def mine(
    *rows: str, placement: tuple[int, ...] | None = None, micro_batches: int = 1, training: bool = True
) -> Schedule:
    made: tuple[Row, ...] = tuple(map(row, rows))
    return Schedule("mine", placement or tuple(range(len(made))), micro_batches, made, training)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("table", "texts"),
    [
        (mine("0F0 0B0", "1F0 1I0 1W0"), []),
        (mine("0F0 1F0 1B0 0B0", placement=(0, 0)), []),
        (mine("0F0", "1F0", training=False), []),
        (mine("0B0", "1F0 1B0"), ["0F0 is missing: add it to rank 0"]),
        (
            mine("0F0", "1F0 1W0"),
            [
                "the backward of stage 0 for micro-batch 0 is missing: add 0B0 to rank 0",
                "1I0 is missing beside 1W0: add it to rank 1",
            ],
        ),
        (
            mine("0F0 0B0 0B0", "1F0 1B0 1W0"),
            [
                "0B0 is there 2 times: leave one",
                "1B0 is there beside 1W0: a backward is whole or split, leave out one of the two",
            ],
        ),
        (
            mine("0F0 0B0 2F0", "1F0 1B0 1F3"),
            [
                "rank 0: 2F0: there is no stage 2, the last is 1",
                "rank 1: 1F3: there is no micro-batch 3, the last is 0",
            ],
        ),
        (mine("0F0 1F0 0B0", "1B0"), ["rank 0: 1F0: stage 1 is on rank 1, move it there"]),
        (mine("0F0 0B0", training=False), ["rank 0: 0B0: an evaluation has forwards only, leave it out"]),
        (
            mine("0B0 0F0", "1F0 1W0 1I0"),
            [
                "rank 0: 0B0 stands before 0F0, which it needs: move it behind",
                "rank 1: 1W0 stands before 1I0, which it needs: move it behind",
                "deadlock: rank 0 stands at 0B0 and waits for 1I0; rank 1 stands at 1F0 and waits for 0F0: on rank 1, "
                "move 1I0 before 1F0",
            ],
        ),
        (
            mine("1F0 0F0 0B0 1B0", placement=(0, 0)),
            [
                "rank 0: 1F0 stands before 0F0, which it needs: move it behind",
                "rank 0: 0B0 stands before 1B0, which it needs: move it behind",
            ],
        ),
        (
            mine("0F0 0F1 0B0 0B1", "1F1 1B1 1F0 1B0", micro_batches=2),
            [
                "1F0 stands behind 1F1: forwards of the last stage must ascend, the engine takes the loss of "
                "micro-batch i from the i-th of them"
            ],
        ),
        (mine("0F1 0F0", "1F1 1F0", micro_batches=2, training=False), []),
        (
            mine("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1", micro_batches=2),
            [
                "deadlock: rank 0 stands at 0B0 and waits for 1B0; rank 1 stands at 1F1 and waits for 0F1: on rank 1, "
                "move 1B0 before 1F1"
            ],
        ),
        (
            mine("0F0 1F1 2F2 3F3 4F4", placement=(0,) * 5, micro_batches=5),
            [
                "5 stages and 5 micro-batches, but only 5 actions: each stage needs a forward, and a backward in a "
                "training, for each micro-batch"
            ],
        ),
        (
            Schedule("mine", (0,), 1, ((Action(0, "X", 0), Action(0, "F", 0), Action(0, "B", 0)),)),
            ["rank 0: 0X0: there is no kind 'X', use F, B, I, W"],
        ),
        (
            mine("0F0 0B0", placement=(0, 2)),
            [
                "1 rows, 1 micro-batches and stages on ranks [0, 2]: each rank needs a row and at least one stage, "
                "and there must be at least one micro-batch"
            ],
        ),
    ],
)
def test_every_fault_is_named(table: Schedule, texts: list[str]) -> None:
    assert faults(table) == texts
    if texts:
        with pytest.raises(ScheduleError) as caught:
            check(table)
        assert str(caught.value) == "\n  - ".join(["the schedule mine cannot be run:", *texts])


cells = st.sampled_from(
    [f"{s}{k}{i}" for s in range(3) for k in "FBIW" for i in range(3)] + ["", "(0F1;1B0)OVERLAP_F_B"]
)


@pytest.mark.quick
@settings(deadline=None)
@given(st.lists(st.lists(cells, max_size=8), max_size=4) | st.text('0123FBIW,;()\n"\0x ', max_size=40))
def test_no_text_breaks_the_reader_or_the_checker(text: Any) -> None:
    try:
        table = from_csv(text if isinstance(text, str) else "\n".join(map(",".join, text)))
    except ScheduleError:
        return
    assert runs(table) == (not faults(table))
    assert from_csv(to_csv(table)) == table and len(str(table).splitlines()) == table.ranks + 1


@pytest.mark.quick
def test_peaks() -> None:
    assert peaks(generate("gpipe", 2, 5)) == (Peak(5, 0, 5), Peak(5, 0, 5))
    assert [peak.held for peak in peaks(generate("1f1b", 4, 9))] == [4, 3, 2, 1]
    assert peaks(generate("zb-h1", 3, 9)) == (Peak(3, 1, 3), Peak(2, 2, 3), Peak(1, 3, 3))
    assert [peak.held for peak in peaks(generate("zb-v", 4, 16))] == [8, 8, 8, 8]
    assert [peak.held for peak in peaks(generate("dualpipe-v", 4, 16))] == [9, 9, 9, 9]
    assert peaks(evaluation(vee(2), 4)) == (Peak(0, 0, 0), Peak(0, 0, 0))
    assert peaks(evaluation(loop(2, 2), 4)) == (Peak(0, 0, 0), Peak(0, 0, 0))
