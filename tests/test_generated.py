"""Generated models, plans, meshes and batches: each computes what one device computes, to 1e-10 in float64, with the
collectives that its Program predicts. What fails shrinks to a small case, printed as a command.

The default profile draws the same cases every time; `--hypothesis-profile=deep` draws ten times as many new ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import dtensor_lm as dl
from dtensor_lm import edges
from dtensor_lm.errors import ConfigError, UserError
from dtensor_lm.mesh import Mesh
from dtensor_lm.sharding_plans import Plan
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.testing.case import LABELS, Case, _compare, batch_of, run
from dtensor_lm.testing.equivalence import Report
from dtensor_lm.testing.shrink import assert_case, smallest
from dtensor_lm.testing.strategies import cases, models, roles
from dtensor_lm.testing.workers import WorkerError, WorkerPool, pool

# `assert_case` makes a failing case small; hypothesis need not.
RELAXED = settings(
    deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], report_multiple_bugs=False
)
STEPS = st.sampled_from([0] * 9 + [2])  # a tenth of them trains too


@st.composite
def hard(draw: st.DrawFn) -> tuple[str, Mapping[str, Any]]:
    switches = ("sinks", "qk_norm", "shared_scale", "biases", "logit_scale", "tied")
    chosen = {name: True for name in switches if draw(st.booleans())}
    shape = {
        "group": draw(st.sampled_from([1, 2])),
        "experts": draw(st.sampled_from([0, 2, 4])),
        "layers": draw(st.integers(1, 2)),
        "dropout": draw(st.sampled_from([0.0, 0.2])),
    }
    return "tests.hard_models:build", {**chosen, **shape}


EVERY = st.one_of(models(), hard())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("least, most, share", [(1, 2, 1.6), (3, 4, 1.2), (6, 8, 0.2)])
def test_what_is_generated_equals_one_device(
    least: int, most: int, share: float, record_property: Callable[[str, object], None]
) -> None:
    """In all three times as many as the profile says; eight ranks cost most."""
    drawn: Counter[str] = Counter()
    with Lanes(2 if most <= 4 else 1) as lanes:

        @settings(RELAXED, max_examples=round(share * settings.default.max_examples))
        @given(case=cases(EVERY, least=least, most=most, steps=STEPS))
        def property_(case: Case) -> None:
            if not lanes.failed:
                drawn[roles(case)] += 1
                lanes.compare(case)

        property_()
    record_property("combinations", json.dumps(drawn))
    if lanes.failed:
        first = lanes.failed[min(lanes.failed)]
        assert_case(first)
        raise AssertionError(f"it failed, and did not when it was run again: {first.command()}")


class Lanes:
    """Compares cases while the next is drawn, so many at a time, each on ranks of its own: one comparison leaves cores
    idle, as its ranks wait for one another. After a failure no more are begun.

    failed: the cases that differ, or of which a rank raised, by their number.
    """

    def __init__(self, lanes: int) -> None:
        self.failed: dict[int, Case] = {}
        self.number = 0
        self.threads = ThreadPoolExecutor(lanes)
        self.running: dict[Future[list[Report]], tuple[int, Case]] = {}
        self.pools: list[dict[int, WorkerPool]] = [{} for _ in range(lanes - 1)]  # beside those of all tests
        self.free: SimpleQueue[dict[int, WorkerPool] | None] = SimpleQueue()
        for lane in (None, *self.pools):
            self.free.put(lane)
        self.lanes = lanes

    def compare(self, case: Case) -> None:
        """Begins it, once a lane is free."""
        program = case.program()
        self.number += 1
        self.wait(self.lanes - 1)
        if not self.failed:
            self.running[self.threads.submit(self.run, program, case)] = self.number, case

    def run(self, program: Program, case: Case) -> list[Report]:
        lane, ranks = self.free.get(), program.mesh.size
        try:
            workers = pool(ranks) if lane is None else lane.setdefault(ranks, WorkerPool(ranks))
            return workers.run(_compare, program, case)
        finally:
            self.free.put(lane)

    def wait(self, most: int) -> None:
        """Until at most so many run."""
        while len(self.running) > most:
            ended, _ = wait(self.running, return_when=FIRST_COMPLETED)
            for future in ended:
                number, case = self.running.pop(future)
                try:
                    equal = future.result()[0].ok
                except WorkerError:
                    equal = False
                if not equal:
                    self.failed[number] = case

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(0)
        self.threads.shutdown()
        for pools in self.pools:
            for each in pools.values():
                each.stop()


@pytest.mark.timeout(600)
@settings(RELAXED, max_examples=6)
@given(case=cases(EVERY, most=4, least=2, steps=st.just(2), dtypes=st.just("float32")))
def test_float32(case: Case) -> None:
    report = run(case)
    assert report.replicas_equal and report.collectives_match and report.initial_values_equal, case.command()
    assert max(report.loss_error, report.max_grad_error, report.grad_norm_error) < 1e-4, (report, case.command())


# What is drawn, and what a failure says


@pytest.mark.quick
def test_labels_are_masked_in_every_pattern() -> None:
    program = dl.resolve(dl.models.build("tiny", layers=1), dl.plans.ddp(), dl.Mesh(dp=4), batch=8, seq=12)
    real = {name: batch_of(program, name, 0)["labels"] != -100 for name in LABELS}
    assert real["all"].all() and not real["none"].any() and real["one"].sum() == 1
    assert 20 < real["some"].sum() < 76
    rows = real["rows"]
    assert (rows.all(1) | ~rows.any(1)).all() and 0 < rows.any(1).sum() < 8
    assert real["start"][:, :4].all() and not real["start"][:, 4:].any()
    assert real["end"][:, -4:].all() and not real["end"][:, :-4].any()


@pytest.mark.quick
def test_a_case_is_a_command_that_reads_as_the_same_case() -> None:
    case = Case("tiny", {"layers": 1}, "a=2", {"compute": {"batch": ["a"]}}, labels="rows", seed=3)
    command = case.command()
    assert command.startswith("python -m dtensor_lm.testing.case '") and command.endswith("'")
    assert Case.parse(command.split("'")[1]) == case


@pytest.mark.quick
@pytest.mark.parametrize(
    "text, faults",
    [
        ("{", ["this case is not JSON"]),
        ("[]", ["a case is a JSON object with model, changes, mesh"]),
        (
            '{"modle": "tiny", "batch": "2", "labels": "som"}',
            ["unknown field 'modle' (did you mean model?)", "batch: '2' is not a int", "labels: 'som' (did you mean"],
        ),
        (
            '{"steps": -1, "batch": true, "seed": 99999999999}',
            ["steps is -1: from 0", "batch: True is not a int", "seed is 99999999999: from 0 to 2**31 - 1"],
        ),
    ],
)
def test_cases_that_cannot_be_read(text: str, faults: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        Case.parse(text)
    assert all(fault in str(error.value) for fault in faults), error.value


def forgetful(program: Any, case: Case) -> Report:
    """On a worker: an edge whose backward forgets its reduction."""
    patch = pytest.MonkeyPatch()
    patch.setitem(edges.TABLE, ("S", "R"), ("all_gather", "slice"))
    try:
        return _compare(program, case)
    finally:
        patch.undo()


@pytest.mark.timeout(300)
def test_what_fails_shrinks_to_a_small_command() -> None:
    wide = Case(
        "tests.hard_models:build",
        {"sinks": True, "biases": True, "tied": True, "layers": 2, "experts": 2, "dropout": 0.2},
        "fsdp=2,tp=2",
        {"compute": {"batch": ["fsdp"], "ffn": ["tp"], "vocab": ["tp"], "res": ["tp"], "kv_heads": ["tp"],
                     "core_heads": ["tp"]}, "storage": {"embed": ["fsdp"]}},
        batch=12, seq=8, micro_batches=3, labels="rows", steps=2, seed=7,
    )  # fmt: skip
    tried = []

    def fails(case: Case) -> bool:
        tried.append(case)
        ranks = Mesh.parse(case.mesh).size
        return pool(ranks).run(forgetful, case.program(), case)[0].max_grad_error > 1e-10

    small = smallest(wide, fails)
    assert len(tried) < 60 and fails(small) and run(small).ok
    assert Mesh.parse(small.mesh).sizes == {"tp": 2}
    assert (small.batch, small.micro_batches, small.labels, small.steps, small.seed) == (1, 1, "all", 0, 0)
    assert not any(small.changes[name] for name in ("sinks", "biases", "tied", "dropout"))
    assert small.changes["layers"] == 1 and len(Plan.from_dict(small.plan).names) <= 2
    again = Case.parse(small.command().split("'")[1])
    assert replace(again, plan=small.plan) == small and Plan.from_dict(again.plan) == Plan.from_dict(small.plan)


@pytest.mark.quick
@pytest.mark.parametrize(
    "case, said",
    [
        (Case("tiny", {"heads": 0}), "model tiny cannot be built with {'heads': 0}: ZeroDivisionError"),
        (Case("tiny", {"layers": "two"}), "model tiny cannot be built with {'layers': 'two'}: TypeError"),
        (Case("tiny-gpt", {"seq": 4}, seq=8), "a sequence of 8, but the table has 4 positions (seq)"),
        (Case("tiny", {"layers": 1}, "a=100", {"compute": {"batch": "a"}}, batch=100), "has 100 ranks: at most 64"),
    ],
    ids=["heads", "layers", "positions", "ranks"],
)
def test_cases_that_cannot_run(case: Case, said: str) -> None:
    with pytest.raises(UserError) as error:
        run(case)
    assert said in str(error.value)


@pytest.mark.quick
def test_a_case_that_fails_is_reported_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how it fails: a smaller case that raises is another failure than one that differs."""

    def ran(case: Case) -> Report:
        if case.seed == 0:
            raise WorkerError("rank 1 of 2 failed")
        return Report(loss_error=float(case.batch > 1))

    monkeypatch.setattr("dtensor_lm.testing.shrink.run", ran)
    command = r"python -m dtensor_lm\.testing\.case "
    with pytest.raises(
        AssertionError, match=rf"not equal to one device: .*\n{command}.*seed.: 5.*\nfound as {command}"
    ):
        assert_case(Case("tiny", {"layers": 1}, batch=4, seed=5))
    with pytest.raises(AssertionError, match=rf"fails on its ranks: rank 1 of 2 failed\n{command}"):
        assert_case(Case("tiny", {"layers": 1}))
    assert_case(Case("tiny", batch=1, seed=5))
