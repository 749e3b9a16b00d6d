"""The same initial values and the same samples on every mesh, and no two shards alike.

Sources: pytorch/pytorch#168058, pytorch/torchtitan#514, pytorch/pytorch#139304, Modalities/modalities#426,
pytorch/torchtitan#49, AI-Hypercomputer/maxtext#1533.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from case_models import biased
from case_runs import Run, Whole, step_of

import dtensor_lm as dl
from dtensor_lm import Mesh, Plan
from dtensor_lm.sharding_plans import standard, tp_sp
from dtensor_lm.testing.equivalence import gathered, parts
from dtensor_lm.testing.workers import pool

# Initial values (torchtitan#514)

MESHES = {
    "tp=2": Run(Mesh(tp=2), tp_sp()),
    "tp=4": Run(Mesh(tp=4), Plan(dict.fromkeys(("heads", "core_heads", "ffn", "vocab"), "tp"))),
    "dp=4 zero 1": Run(Mesh(dp=4), standard(1), batch=4),
    "dp=4 zero 3": Run(Mesh(dp=4), standard(3), batch=4),
    "tp=2,fsdp=2": Run(Mesh(tp=2, fsdp=2)),
    "stored by vocab": Run(Mesh(dp=4), Plan({"batch": "dp"}, storage={"vocab": "dp", "ffn": "dp"}), batch=4),
}


def initial(run: Run, seed: int) -> Whole:
    return gathered(step_of(run).init(seed).parameters)


@pytest.fixture(scope="module")
def expected() -> Whole:
    return Run(Mesh()).everywhere(initial, 0)[0]


@pytest.mark.case("RNG-01")
@pytest.mark.parametrize("mesh", [pytest.param(m, marks=pytest.mark.quick if m == "tp=2" else ()) for m in MESHES])
def test_initial_values_do_not_depend_on_the_mesh(mesh: str, expected: Whole) -> None:
    for found in MESHES[mesh].everywhere(initial, 0):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.case("RNG-01")
@pytest.mark.quick
def test_no_two_shards_or_layers_or_seeds_are_alike(expected: Whole) -> None:
    drawn = {name: value for name, value in expected.items() if "norm" not in name}
    assert len(drawn) == 2 + 2 * 7
    assert all((value == 1).all() for name, value in expected.items() if name not in drawn)
    for value in drawn.values():
        for dim in (0, 1):
            assert not any(torch.equal(a, b) for a, b in combinations(value.chunk(4, dim), 2))
    for a, b in combinations(drawn.values(), 2):
        assert a.shape != b.shape or not torch.equal(a, b)
    other = Run(Mesh(tp=2), tp_sp()).everywhere(initial, 1)[0]
    assert not any(torch.equal(other[name], value) for name, value in drawn.items())


@pytest.mark.case("RNG-01")
def test_initial_values_of_biases_and_scalars() -> None:
    one, two = Run(Mesh(), model=biased), Run(Mesh(dp=2, tp=2), standard(3), biased)
    alone, shards = one.everywhere(initial, 0)[0], two.everywhere(initial, 0)[0]
    assert all(torch.equal(shards[name], value) for name, value in alone.items())


# Who reads which samples (torchtitan#49, maxtext#1533)

ORDERS = ["dp=2,fsdp=2,tp=2", "tp=2,fsdp=2,dp=2", "fsdp=2,tp=2,dp=2", "dp=4,tp=2", "dp=8"]
STEPS = 3


def samples(folder: str, meshes: list[str]) -> list[tuple[dict[str, int], list[list[Whole]]]]:
    """Per mesh: this rank's place, and its micro-batches of some steps."""
    found = []
    for text in meshes:
        mesh = Mesh.parse(text)
        model = dl.models.build("tiny", layers=1)
        program = dl.resolve(model, standard(), mesh, batch=16, seq=16, micro_batches=2)
        feed = dl.Feed(program, folder, seed=5, evaluation=6, device="cpu")
        rank = torch.distributed.get_rank() if mesh.size > 1 else 0
        found.append((mesh.coordinate(rank), [list(feed.batch(i)) for i in range(STEPS)]))
    return found


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text("".join(f"line {j} of file {i}, {i * j}\n" for j in range(20)))
    return str(tmp_path)


@pytest.mark.case("DATA-09")
def test_every_mesh_reads_the_same_samples(corpus: str) -> None:
    ((_, alone),) = pool(1).run(samples, corpus, [""])[0]
    ranks = pool(8).run(samples, corpus, ORDERS)
    for which, text in enumerate(ORDERS):
        mesh = Mesh.parse(text)
        places: dict[int, list[list[Whole]]] = {}
        for rank in ranks:
            at, steps = rank[which]
            data = at.get("dp", 0) * mesh["fsdp"] + at.get("fsdp", 0)
            first = places.setdefault(data, steps)
            for mine, theirs in zip(steps, first, strict=True):  # ranks that differ in tp only read the same rows
                for a, b in zip(mine, theirs, strict=True):
                    assert all(torch.equal(a[name], b[name]) for name in ("tokens", "labels"))
        assert sorted(places) == list(range(mesh["dp"] * mesh["fsdp"]))
        for step, whole in enumerate(alone):
            for micro, expected in enumerate(whole):
                for name in ("tokens", "labels"):
                    blocks = [places[i][step][micro][name] for i in sorted(places)]
                    assert torch.equal(torch.cat(blocks), expected[name]), (text, step, micro)
    rows = [tuple(row.tolist()) for micro in alone[0] for row in micro["tokens"]]
    assert len(set(rows)) == len(rows) == 16  # so that blocks of different ranks are disjoint
    assert not torch.equal(alone[0][0]["tokens"], alone[1][0]["tokens"])


@pytest.mark.case("DATA-09")
def test_parts_of_a_whole_batch_are_the_same_parts(corpus: str) -> None:
    """The comparison with one device cuts a batch as the feed does."""
    assert all(pool(4).run(same_parts, corpus, Mesh(tp=2, fsdp=2)))


def same_parts(folder: str, mesh: Mesh) -> bool:
    program = dl.resolve(dl.models.build("tiny", layers=1), standard(), mesh, batch=8, seq=16, micro_batches=2)
    mine = dl.Feed(program, folder, device="cpu")
    tokens, labels = mine.training.rows(1, range(8))
    whole = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
    cut = parts(program, whole, torch.device("cpu"))
    return all(torch.equal(a[n], b[n]) for a, b in zip(mine.batch(1), cut, strict=True) for n in whole)
