"""What torch's engine really does with a table: which layers run for which micro-batch, in which order, and how many
activations exist meanwhile. Seen from inside a model's own layers, on real processes."""

from __future__ import annotations

import pytest
from sleeping import Seconds, expected, steps

from dtensor_lm.schedules import KNOWN, generate, peaks
from dtensor_lm.testing.workers import pool

LAYERS = 2  # of a stage: with one, a whole backward looks like its two halves, one after the other


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 2) for kind in KNOWN), ("1f1b", 4), ("zb-v", 4)])
def test_a_table_is_what_runs_and_what_is_kept(kind: str, ranks: int) -> None:
    table = generate(kind, ranks, 2 * ranks)
    split = [LAYERS] * table.stages
    runs = pool(ranks).run(steps, kind, ranks, table.micro_batches, split, Seconds(), most=2)
    for rank, of_rank in enumerate(runs):
        for step in of_rank:
            assert [event[:3] for event in step.events] == expected(table, rank, split)
            assert max(event.alive for event in step.events) == LAYERS * peaks(table)[rank].held
