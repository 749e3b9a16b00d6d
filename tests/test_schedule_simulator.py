"""Times: the closed forms of the papers, in whole numbers, so that they are exact."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_lm.errors import ScheduleError
from dtensor_lm.schedules.checker import peaks
from dtensor_lm.schedules.comparison import compare, table_text
from dtensor_lm.schedules.library import KNOWN, evaluation, generate
from dtensor_lm.schedules.simulator import Durations, simulate
from dtensor_lm.schedules.table import loop, row, vee

pytestmark = pytest.mark.quick

RANKS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (1, 1), (3, 5)])
def test_gpipe_and_1f1b(p: int, forward: int, backward: int) -> None:
    """Huang et al. 2019; Narayanan et al. 2021, section 2.2: p - 1 of m + p - 1 parts of the time are bubble."""
    for kind in ("gpipe", "1f1b"):
        for m in (p, p + 1, 2 * p, 4 * p):
            timeline = simulate(generate(kind, p, m), Durations(forward, backward))
            assert timeline.makespan == (m + p - 1) * (forward + backward)
            assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_1f1b_and_looped_bfs(p: int, v: int) -> None:
    """Narayanan et al. 2021, section 2.2.2: v stages per rank divide the bubble by v, for whole rounds of p."""
    for kind in ("interleaved-1f1b", "looped-bfs"):
        for m in (p, 2 * p, 4 * p):
            timeline = simulate(generate(kind, p, m, v), Durations(1, 2))
            assert timeline.makespan == (v * m + p - 1) * 3
            assert timeline.bubble_fraction == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


@pytest.mark.parametrize("p", RANKS)
def test_split_backwards(p: int) -> None:
    """Qi et al. 2024: with F, I and W equally long, ZB-H1 leaves a third of 1F1B's bubble, p - 1 forwards."""
    for v, kind in ((1, "zb-h1"), (2, "interleaved-zero-bubble"), (3, "interleaved-zero-bubble"), (2, "dualpipe-v")):
        for m in (2 * p, 3 * p, 4 * p):
            assert simulate(generate(kind, p, m, v), Durations(1, 2, 1, 1)).makespan == 3 * v * m + p - 1


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_is_without_a_bubble(p: int) -> None:
    """With F, I and W equally long and free communication no rank waits between its first and its last action.

    What remains is the way in: rank r begins after r forwards, and ends so much later.
    """
    for m in (2 * p - 1, 2 * p, 2 * p + 1, 4 * p):
        timeline = simulate(generate("zb-v", p, m), Durations(1, 2, 1, 1))
        assert [timeline.idle(rank) for rank in range(p)] == [0] * p
        assert [(spans[0].start, spans[-1].end) for spans in timeline.spans] == [(r, r + 6 * m) for r in range(p)]
    if p > 1:
        assert max(simulate(generate("zb-v", p, 2 * p - 2)).idle(rank) for rank in range(p)) > 0
        slow = simulate(generate("zb-v", p, 2 * p), Durations(1, 2, 1, 1, send=1))
        assert max(slow.idle(rank) for rank in range(p)) > 0


@pytest.mark.parametrize("p", RANKS)
def test_evaluation(p: int) -> None:
    """No order ends sooner: the last rank begins after p - 1 forwards, and on a V its work must also come back."""
    for m in (p, 2 * p + 1):
        assert simulate(evaluation(loop(p, 3), m)).makespan == 3 * m + p - 1
        assert simulate(evaluation(vee(p), m)).makespan == 2 * m + 2 * (p - 1)


@pytest.mark.parametrize("send", [0, 2, 5])
def test_sends_cost_between_ranks_only(send: int) -> None:
    assert simulate(generate("gpipe", 4, 1), Durations(1, 2, send=send)).makespan == 12 + 6 * send
    assert simulate(evaluation(vee(2), 1), Durations(send=send)).makespan == 4 + 2 * send


def test_durations_per_stage() -> None:
    timeline = simulate(generate("1f1b", 2, 1), Durations(forward=[1, 10], backward=[100, 1000]))
    assert timeline.makespan == 1111
    assert [[(str(span.action), span.start, span.end) for span in spans] for spans in timeline.spans] == [
        [("0F0", 0, 1), ("0B0", 1011, 1111)],
        [("1F0", 1, 11), ("1B0", 11, 1011)],
    ]
    assert timeline.bubble_fraction == pytest.approx(0.5)


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(generate("1f1b", 2, 1), Durations(forward=[1, 2, 3], backward=-1, send=math.inf))
    assert list(caught.value.faults) == [
        "forward has 3 durations: give one number, or one for each of 2 stages",
        "backward is -1: durations are finite and not negative",
        "send is inf: durations are finite and not negative",
    ]
    table = generate("1f1b", 2, 1)
    with pytest.raises(ScheduleError, match="1F0 is missing: add it to rank 1"):
        simulate(type(table)("broken", table.placement, 1, (table.rows[0], row("1B0"))))


sizes = st.tuples(st.sampled_from(list(KNOWN)), st.integers(1, 5), st.integers(1, 3), st.integers(1, 12))
times = st.lists(st.integers(1, 9), min_size=5, max_size=5)


@settings(deadline=None)
@given(sizes, times)
def test_a_timeline_is_a_run_of_its_table(size: tuple[str, int, int, int], time: list[int]) -> None:
    """Rows keep their order, nobody begins before its inputs or later than needed, and peaks are those of the rows."""
    kind, p, v, m = size
    try:
        table = generate(kind, p, m, v)
    except ScheduleError:
        return
    timeline = simulate(table, Durations(*time))
    ends = {span.action: span.end for spans in timeline.spans for span in spans}
    for rank, spans in enumerate(timeline.spans):
        assert tuple(span.action for span in spans) == table.rows[rank]
        free = 0.0
        for action, start, end in spans:
            arrivals = [ends[x] + (time[4] if table.placement[x.stage] != rank else 0) for x in table.needs(action)]
            assert start == max([free, *arrivals]) and end - start == time["FBIW".index(action.kind)]
            free = end
        kept = [(s.start, 1) for s in spans if s.action.kind == "F"]
        kept += [(s.end, -1) for s in spans if s.action.kind in "BW"]
        held = most = 0
        for _, change in sorted(kept):  # what is let go of at a moment goes before what comes then
            held += change
            most = max(most, held)
        assert most == peaks(table)[rank].held
    busy = sum(time["FBIW".index(action.kind)] for actions in table.rows for action in actions)
    assert timeline.bubble_fraction == pytest.approx(float(1 - Fraction(busy, p * int(timeline.makespan))), abs=1e-12)


def test_the_comparison_of_all() -> None:
    lines = {(c.kind, c.ranks, c.micro_batches): c for c in compare(ranks=(4, 8))}
    assert {key[0] for key in lines} == set(KNOWN) and {key[1:] for key in lines} == {
        (4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32),
    }  # fmt: skip
    assert len(lines) == len(KNOWN) * 6 - 2  # dualpipe-v needs as many micro-batches as stages
    assert lines["1f1b", 8, 16].bubble_fraction == pytest.approx(7 / 23)
    assert lines["interleaved-1f1b", 8, 16].bubble_fraction == pytest.approx(7 / 39)
    assert lines["zb-v", 8, 16].bubble_fraction == pytest.approx(7 / 103)
    assert lines["gpipe", 4, 16].held == 16 and lines["1f1b", 4, 16].held == 4 and lines["zb-v", 4, 16].held == 4
    text = table_text(lines.values()).splitlines()
    assert " ".join(text[0].split()) == "ranks 4 4 4 8 8 8"
    assert " ".join(text[1].split()) == "micro-batches 4 8 16 8 16 32"
    assert " ".join(text[4].split()) == "1f1b 42.9% 4 27.3% 4 15.8% 4 46.7% 8 30.4% 8 17.9% 8"
    assert " ".join(text[-1].split()) == "dualpipe-v - 5.9% 4.5 3.0% 4.5 - 6.8% 8.5 3.5% 8.5"
