"""Every collective is counted, whoever issues it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dtensor_lm.collectives import all_gather, group_of
from dtensor_lm.mesh import Mesh
from dtensor_lm.testing.counting import CountCollectives, Counts
from dtensor_lm.testing.workers import pool

pytestmark = pytest.mark.quick


def counted() -> Counts:
    mesh, x = Mesh(tp=2), torch.ones(3)
    with CountCollectives(mesh) as count:
        all_gather(x, group_of(mesh, ("tp",)))
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
    return count.counts


def test_collectives_of_torch_itself_are_seen() -> None:
    for counts in pool(2).run(counted):
        assert counts.pop(("all_gather", ("tp",), "float32", 24)) == 1
        assert sorted(op for op, *_ in counts) == ["c10d::allreduce_", "c10d::broadcast_"]
        assert {axes for _, axes, *_ in counts} == {("unknown",)}
