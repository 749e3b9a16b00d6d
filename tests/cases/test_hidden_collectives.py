"""A step issues the collectives that its Program names, no others, and none of them carries logits.

Sources: pytorch/pytorch#167106, pytorch/pytorch#166593, pytorch/pytorch#173716.
"""

from __future__ import annotations

import pytest
import torch
from case_runs import Run, batch_of, step_of

import dtensor_lm as dl
from dtensor_lm import Mesh, Plan
from dtensor_lm.collectives import all_reduce, group_of
from dtensor_lm.sharding_plans import standard, tp, tp_sp, zero3
from dtensor_lm.testing.counting import CountCollectives, Counts, differences, predicted
from dtensor_lm.testing.equivalence import parts

# Logits (batch, seq, vocab) are by far the largest tensor.
SIZES = {"changes": {"vocab": 96}, "batch": 8, "seq": 16}
ATTENTION_WHOLE = Plan({"ffn": "tp", "vocab": "tp", "res": "tp"})
HEAD_WHOLE = Plan({n: a for n, a in tp_sp().compute.items() if n != "vocab"}, storage={"vocab": "tp"})
RUNS = {
    "tp": Run(Mesh(tp=2), tp(), **SIZES),
    "tp_sp": Run(Mesh(tp=2), tp_sp(), **SIZES),
    "zero 3": Run(Mesh(dp=2), zero3(), **SIZES),
    "zero 3 with tp": Run(Mesh(dp=2, tp=2), standard(3), micro_batches=2, **SIZES),
    "head gathers": Run(Mesh(tp=2), HEAD_WHOLE, **SIZES),
    "attention gathers": Run(Mesh(tp=2), ATTENTION_WHOLE, **SIZES),
}


def counted(run: Run) -> list[Counts]:
    """Per step; the last step with a collective that nobody planned."""
    step, counts = step_of(run, dl.adamw(lr=1e-2), clip_norm=1.0), []
    state = step.init()
    for i in range(4):
        mine = parts(step.program, batch_of([16, 9, 0, 16, 3, 8, 16, 1], 16, 96, seed=i), step.device)
        with CountCollectives(run.mesh) as count:
            state, _ = step(state, mine)
            if i == 3:
                all_reduce(torch.ones(7, dtype=torch.float64), group_of(run.mesh, run.mesh.active))
        counts.append(count.counts)
    return counts


@pytest.mark.case("PERF-01")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.quick if n in ("tp_sp", "zero 3") else ()) for n in RUNS]
)
def test_every_step_issues_what_the_program_says(name: str) -> None:
    run = RUNS[name]
    expected = predicted(run.program().collectives)
    assert expected
    for *steps, last in run.everywhere(counted):
        for counts in steps:
            assert differences(expected, counts) == []
        axes = ".".join(run.mesh.active)
        assert differences(expected, last) == [f"all_reduce @{axes} float64 of 56 bytes: predicted 0, found 1"]


@pytest.mark.case("PERF-01")
@pytest.mark.quick
@pytest.mark.parametrize("name", RUNS)
def test_no_collective_carries_logits(name: str) -> None:
    """Not even one rank's part of them: a cut head exchanges numbers per token, a whole one gathers hidden states."""
    run = RUNS[name]
    rows = run.batch // run.micro_batches // run.mesh["dp"]
    part_of_logits = rows * run.seq * 96 // run.mesh["tp"] * 8
    assert max(c.bytes for c in run.program().collectives) < part_of_logits


@pytest.mark.case("PERF-01")
@pytest.mark.quick
def test_what_a_plan_gathers_is_in_the_program() -> None:
    def gathered(name: str) -> set[str]:
        return {c.where for c in RUNS[name].program().collectives if (c.op, c.phase) == ("all_gather", "forward")}

    shown = [" ".join(line.split()) for line in str(RUNS["head gathers"].program()).splitlines()]
    assert "forward all_gather @tp 1 x 12.0 KiB head: parameters (float64)" in shown  # its module and its size
    assert "head: parameters" in gathered("head gathers") - gathered("tp_sp")
    assert "layers.0: parameters" in gathered("zero 3") - gathered("tp")
    assert "layers.0.attention: x" in gathered("tp_sp") - gathered("tp")
