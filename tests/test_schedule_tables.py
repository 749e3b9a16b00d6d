"""Tables, their files, and the known schedules: equal to what torch's own classes list, and to what they execute."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from dtensor_lm.errors import ScheduleError
from dtensor_lm.schedules.library import KNOWN, evaluation, generate
from dtensor_lm.schedules.table import Action, Schedule, loop, row, vee
from dtensor_lm.schedules.table_file import from_csv, read, to_csv, write
from dtensor_lm.testing.workers import pool

SIZES = [(p, v, m) for p in (1, 2, 3, 4) for v in (1, 2, 3) for m in (1, 2, 3, 4, 5, 8, 9)] + [(8, 2, 16), (8, 1, 24)]
NO_ACTION = "is not an action: write stage, kind (F, B, I or W) and micro-batch, such as 3F0"


def schedules(kind: str) -> list[Schedule]:
    found = []
    for p, v, m in SIZES:
        try:
            found.append(generate(kind, p, m, v))
        except ScheduleError:
            continue
    return found


# Tables


@pytest.mark.quick
def test_a_table_is_plain_data() -> None:
    table = Schedule("mine", loop(2, 1), 1, (row("0F0 0B0"), row("1F0 1I0 1W0")))
    assert table == Schedule("mine", (0, 1), 1, (row("0F0 0B0"), row("1F0 1I0 1W0")))
    assert hash(table) == hash(Schedule("mine", (0, 1), 1, (row("0F0 0B0"), row("1F0 1I0 1W0"))))
    assert table.rows[1] == (Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0))
    assert str(table) == "mine: 2 ranks, 2 stages, 1 micro-batches\nrank 0: 0F0 0B0\nrank 1: 1F0 1I0 1W0"
    assert (loop(3, 2), vee(3), vee(2, 3)) == ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0), (0, 1, 1, 0, 0, 1))


@pytest.mark.quick
def test_what_an_action_needs() -> None:
    table = Schedule("mine", (0, 1, 0), 1, (row("0F0 2F0 2I0 2W0 0B0"), row("1F0 1B0")))
    needs = {str(each): " ".join(map(str, table.needs(each))) for each in (*table.rows[0], *table.rows[1])}
    assert needs == {
        "0F0": "", "1F0": "0F0", "2F0": "1F0", "2I0": "2F0", "2W0": "2I0", "1B0": "1F0 2I0", "0B0": "0F0 1B0",
    }  # fmt: skip


@pytest.mark.quick
def test_no_torch_is_imported() -> None:
    code = (
        "import sys, dtensor_lm.schedules as s; t = s.generate('zb-v', 2, 4); "
        "s.simulate(t); s.check(t); s.to_csv(t); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "False\n", ran.stderr


# Files


@pytest.mark.quick
@pytest.mark.parametrize("kind", KNOWN)
def test_a_file_gives_back_the_table(kind: str, tmp_path: Path) -> None:
    for table in schedules(kind)[:20]:
        path = tmp_path / f"{kind}.csv"
        write(table, str(path))
        assert read(str(path)) == table
    for table in (evaluation(loop(3, 2), 4), evaluation(vee(3), 4)):
        assert from_csv(to_csv(table), "evaluation") == table


@pytest.mark.quick
def test_the_columns_of_a_file() -> None:
    assert to_csv(generate("1f1b", 2, 2)) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"
    stuck = Schedule("stuck", (0, 1), 2, (row("0F0 0B0 0F1 0B1"), row("1F0 1F1 1B0 1B1")))
    assert to_csv(stuck) == "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", ["it is empty: write a row for each rank, such as 0F0,0B0"]),
        (
            "0F0,0X0\n1F,1F0 1B0\n",
            [
                f"row 1, column 2: '0X0' {NO_ACTION}",
                f"row 2, column 1: '1F' {NO_ACTION}",
                f"row 2, column 2: '1F0 1B0' {NO_ACTION}",
            ],
        ),
        (
            "0F0,0SEND_F0,0B0\n",
            ["row 1, column 2: '0SEND_F0' is added by the engine: leave out everything but F, B, I and W"],
        ),
        (
            "0F0,1F0,1B0,0B0\n\n,,\n1W0",
            [
                "row 2 is empty: each rank needs a row with actions, remove the row or fill it",
                "row 3 is empty: each rank needs a row with actions, remove the row or fill it",
                "row 4, column 1: '1W0' is of stage 1, which row 1 has too: a stage is on one rank, move all its "
                "actions there",
            ],
        ),
        (
            "0F0,0F7,2F0\n",
            [
                "stages go up to 2, but there is no 1: number them from 0 without gaps",
                "micro-batches go up to 7, but there is no 1: number them from 0 without gaps",
            ],
        ),
        ("0F99999999999\n", ["micro-batches go up to 99999999999, but there is no 0: number them from 0 without gaps"]),
    ],
)
def test_a_bad_file(text: str, faults: list[str]) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    assert list(caught.value.faults) == faults and caught.value.title == "the table table cannot be read:"


@pytest.mark.quick
@pytest.mark.parametrize("text", ["00F0", "0F00", "-1F0", "0f0", "0F0x", "٠F0", "0F0;0B0", "(0F0;)OVERLAP_F_B", "1 F0"])
def test_near_misses_are_no_actions(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        from_csv(text)


@pytest.mark.quick
def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.csv", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ScheduleError, match=re.escape(f"the table {path} cannot be read: {reason}")):
            read(str(path))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="it is not a text file"):
        read(str(tmp_path / "binary.csv"))
    with pytest.raises(ScheduleError, match="is not CSV: "):
        from_csv('0F0,"0B0')
    with pytest.raises(ScheduleError, match="cannot be written: No such file or directory"):
        write(generate("1f1b", 2, 2), str(tmp_path / "none" / "table.csv"))


@pytest.mark.quick
def test_an_overlapped_pair_is_its_two_actions() -> None:
    assert from_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n").rows == (row("0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1"),)


@pytest.mark.quick
def test_evaluation() -> None:
    table = evaluation(vee(2), 2)
    assert table.rows == (row("0F0 0F1 3F0 3F1"), row("1F0 1F1 2F0 2F1")) and not table.training
    assert str(table).startswith("evaluation: 2 ranks, 4 stages, 2 micro-batches, forwards only\n")


# What cannot be made


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1", 2, 2), "unknown schedule '1f1' (did you mean 1f1b"),
        (("gpipe", 2, 4, 2), "2 virtual stages: gpipe has 1 per rank, use 1"),
        (("zb-v", 2, 4, 3), "3 virtual stages: zb-v has 2 per rank, use 2"),
        (("dualpipe-v", 4, 7), "7 micro-batches: dualpipe-v needs at least as many as it has stages, use 8 or more"),
        (
            ("interleaved-1f1b", 4, 9),
            "9 micro-batches: with 4 ranks they go in 2 rounds, and 9 is not a multiple of 2; use 8 or 10",
        ),
        (
            ("interleaved-zero-bubble", 4, 14),
            "14 micro-batches: with 4 ranks they go in 3 rounds, and 14 is not a multiple of 3; use 12 or 15",
        ),
        (("1f1b", 0, -1, 1), "0 ranks: at least 1 is needed\n  - -1 micro-batches: at least 1 is needed"),
    ],
)
def test_what_a_schedule_cannot_do(arguments: Any, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        generate(*arguments)
    assert message in str(caught.value)


@pytest.mark.quick
def test_the_numbers_that_an_error_names_work() -> None:
    for p in range(1, 9):
        for m in range(1, 60):
            try:
                generate("interleaved-1f1b", p, m)
            except ScheduleError as error:
                found = re.search(r"use (\d+) or (\d+)", str(error))
                assert found
                for near in map(int, found.groups()):
                    generate("interleaved-1f1b", p, near)
                tried = range(int(found[1]) + 1, int(found[2]))
                assert m in tried and all(n % (n // p) for n in tried)


# Torch


@dataclass
class Numbers:
    """What torch's constructors read of a stage to list a schedule; a real stage needs a process group."""

    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: Any = None


TORCH: dict[str, Any] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}


def names(actions: Any) -> str:
    """The computations of a list of torch's actions, in order, overlapped pairs one after the other."""
    flat = [each for action in actions if action is not None for each in (action.sub_actions or [action])]
    return " ".join(str(each) for each in flat if each.computation_type.value in "FBIW")


@pytest.mark.quick
@pytest.mark.parametrize("kind", TORCH)
def test_equal_to_what_torch_lists(kind: str) -> None:
    compared = 0
    for table in schedules(kind):
        stages: Any = [Numbers(table.stages, table.ranks) for _ in table.stages_of(0)]
        try:
            listed = TORCH[kind](stages, table.micro_batches)
        except ValueError:  # torch asks for whole rounds with one stage per rank too, where rounds change nothing
            assert table.virtual_stages == 1
            continue
        ranks = listed.stage_index_to_group_rank
        assert table.placement == tuple(ranks[stage] for stage in sorted(ranks))
        order = listed.pipeline_order
        assert [names(order[rank]) for rank in sorted(order)] == [" ".join(map(str, each)) for each in table.rows]
        compared += 1
    assert compared >= 10


@pytest.mark.quick
@pytest.mark.parametrize("kind", KNOWN)
def test_the_engine_takes_our_files(kind: str, tmp_path: Path) -> None:
    for table in schedules(kind):
        stages: Any = [Numbers(table.stages, table.ranks) for _ in table.stages_of(0)]
        engine = _PipelineScheduleRuntime(stages, table.micro_batches)
        write(table, str(tmp_path / "table.csv"))
        engine._load_csv(str(tmp_path / "table.csv"))
        found = engine.stage_index_to_group_rank
        assert table.placement == tuple(found[stage] for stage in sorted(found))
        with_communication = engine.pipeline_order_with_comms
        assert [names(with_communication[rank]) for rank in range(table.ranks)] == [
            " ".join(map(str, each)) for each in table.rows
        ]


class Recorder(PipelineStage):
    """A real stage that writes down what it is told to do."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(f"{self.stage_index}F{fwd_chunk_id}")
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(f"{self.stage_index}B{bwd_chunk_id}")
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def executed(kind: str, micro_batches: int) -> str:
    """What a real step of torch's class does on this rank."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    stage: Any = Recorder(nn.Linear(2, 2), rank, world, torch.device("cpu"))
    stage.seen = []
    run = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stage, micro_batches, loss_fn=nn.functional.mse_loss)
    x = torch.ones(micro_batches, 2)
    run.step(*([x] if rank == 0 else []), target=x if rank == world - 1 else None)
    return " ".join(stage.seen)


@pytest.mark.parametrize("micro_batches", [4, 7])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_equal_to_what_torch_executes(kind: str, micro_batches: int) -> None:
    """Torch lists the last rank of 1F1B otherwise than it executes it, so the list is no measure."""
    done = pool(4).run(executed, kind, micro_batches)
    assert done == [" ".join(map(str, each)) for each in generate(kind, 4, micro_batches).rows]
