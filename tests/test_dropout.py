"""Dropout's masks and initial values: the same bits on every mesh, for every number of micro-batches, and when a
forward is computed again in backward."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtensor_lm as dl
from dtensor_lm.config import CheckConfig
from dtensor_lm.counters import keys
from dtensor_lm.errors import ModelError
from dtensor_lm.models.gpt import GPT, GPTConfig
from dtensor_lm.models.single import drawing
from dtensor_lm.ops import Dropout, Random, dropout
from dtensor_lm.ops.dropout import Moment, Site
from dtensor_lm.sharding_plans import Plan
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.state import wrap
from dtensor_lm.testing import check_regions
from dtensor_lm.testing.equivalence import Reference, compare, gathered, parts, random_batch, worst
from dtensor_lm.testing.local import assert_equivalent
from dtensor_lm.testing.workers import pool

SMALL = GPTConfig(vocab=16, embed=16, layers=2, heads=8, seq=8, dropout=0.5, attention_dropout=0.25)
BATCH, SEQ = 24, 8
CP = Plan({"seq": "cp", "res": "cp"})
HEADS_IN_CORE = Plan({"seq": "cp", "res": "cp", "core_heads": "cp"})

# mesh, plan, micro-batches
RUNS: list[tuple[str, Plan, int]] = [
    ("", dl.plans.standard(), 4),
    ("dp=2", dl.plans.standard(1), 1),
    ("tp=2", dl.plans.standard(), 2),
    ("tp=2", dl.plans.standard(sequence_parallel=False), 1),
    ("cp=2", CP, 3),
    ("cp=2", HEADS_IN_CORE, 1),
    ("fsdp=3", dl.plans.standard(), 2),
    ("dp=4", dl.plans.standard(3), 1),
    ("tp=4", dl.plans.standard(), 3),
    ("fsdp=2,tp=2", dl.plans.standard(), 2),
    ("tp=2,dp=2", dl.plans.standard(2), 1),
    ("dp=2,fsdp=3", dl.plans.standard(), 4),
    ("fsdp=3,tp=2", dl.plans.standard(3), 1),
    ("dp=2,fsdp=2,tp=2", dl.plans.standard(1), 3),
    ("tp=8", dl.plans.standard(), 1),
]


def small() -> nn.Module:
    return dl.abstract(lambda: GPT(SMALL))


def program(mesh: str, plan: Plan, micro: int) -> Program:
    return dl.resolve(
        small(), plan, dl.Mesh.parse(mesh), batch=BATCH, seq=SEQ, micro_batches=micro, dtype="float64"
    )  # fmt: skip


class Kept:
    """Within it, every mask that is drawn, by site in the order of the draws."""

    def __enter__(self) -> defaultdict[str, list[Tensor]]:
        masks: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.original = original = Random.keep

        def keep(self: Random, p: float, shape: Any) -> Tensor:
            masks[self.site].append(original(self, p, shape))
            return masks[self.site][-1]

        Random.keep = keep
        return masks

    def __exit__(self, *_: Any) -> None:
        Random.keep = self.original


def draws(mesh: str, plan: Plan, micro: int) -> list[tuple[str, list[tuple[int, int]], Tensor]]:
    """Every mask of the second step on this rank: site, place in the whole step, bits; and all initial values."""
    p = program(mesh, plan, micro)
    step = dl.train_step(p, dl.sgd(lr=0.0), device="cpu")
    rank = torch.distributed.get_rank()
    state, _ = step(step.init(3), parts(p, random_batch(p, 0), step.device))
    with Kept() as masks:
        step(state, parts(p, random_batch(p, 1), step.device))
    found = []
    for path, region in p.regions.items():
        for name, layout in region.randoms.items():
            box = layout.box(p.mesh.coordinate(rank))
            rows = BATCH // micro
            assert len(masks[f"{path}.{name}"]) == micro
            for i, mask in enumerate(masks[f"{path}.{name}"]):
                place = [(a + i * rows, b + i * rows) if d == 0 else (a, b) for d, (a, b) in enumerate(box)]
                found.append((f"{path}.{name}", place, mask))
    initial = gathered(step.init(3).parameters)
    found += [(f"initial {n}", [(0, s) for s in x.shape], x) for n, x in initial.items()]
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Tensor]:
    return {site: mask for site, _, mask in pool(1).run(draws, "", dl.plans.standard(), 1)[0]}


@pytest.mark.case("RNG-01", "RNG-02")
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0] or 'one'}-{run[2]}")
def test_masks_and_initial_values_are_the_same_bits_on_every_mesh(
    run: tuple[str, Plan, int], alone: dict[str, Tensor]
) -> None:
    seen = {site: torch.zeros(x.shape, dtype=torch.int64) for site, x in alone.items()}
    for rank in pool(dl.Mesh.parse(run[0]).size).run(draws, *run):
        assert {site for site, _, _ in rank} == {*alone}
        for site, place, found in rank:
            block = tuple(slice(*span) for span in place)
            assert torch.equal(alone[site][block], found), site
            seen[site][block] += 1
    assert all((count >= 1).all() for count in seen.values())  # the ranks together hold all of it


def test_masks_are_dropouts(alone: dict[str, Tensor]) -> None:
    masks = {site: x for site, x in alone.items() if not site.startswith("initial")}
    assert len(masks) == 1 + 2 * 3
    for site, mask in masks.items():
        p = SMALL.attention_dropout if "core" in site else SMALL.dropout
        rate, deviation = 1 - mask.double().mean().item(), math.sqrt(p * (1 - p) / mask.numel())
        assert abs(rate - p) < 4 * deviation, site
        for dim in range(mask.ndim):  # no two slices alike: neighbours agree as often as independent draws
            a, b = mask.narrow(dim, 0, mask.shape[dim] - 1), mask.narrow(dim, 1, mask.shape[dim] - 1)
            agree, expected = (a == b).double().mean().item(), p**2 + (1 - p) ** 2
            assert abs(agree - expected) < 5 * math.sqrt(expected * (1 - expected) / a.numel()), (site, dim)
    same_shape = [x for site, x in masks.items() if "core" not in site]
    assert not any(torch.equal(a, b) for i, a in enumerate(same_shape) for b in same_shape[:i])


@pytest.mark.quick
def test_masks_depend_on_seed_step_and_site_and_on_nothing_else() -> None:
    def mask(seed: int = 0, step: int = 0, site: str = "a", row: int = 0) -> Tensor:
        return Site(site, (8, 4), [(0, 4), (0, 4)], row_stride=4).at(Moment.of(seed, step, row)).keep(0.5, (4, 4))

    assert torch.equal(mask(), mask())
    for other in (mask(seed=1), mask(step=1), mask(site="b"), mask(row=4), mask(seed=1, step=0), mask(seed=0, step=1)):
        assert not torch.equal(mask(), other)
    whole = Site("a").at(Moment.of(0, 0)).keep(0.5, (8, 4))
    assert torch.equal(whole, torch.cat([mask(), mask(row=4)]))


@pytest.mark.quick
def test_bits_are_splitmix_of_the_index() -> None:
    """Against whole numbers in plain Python."""
    word = (1 << 64) - 1

    def splitmix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & word
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & word
        return z ^ (z >> 31)

    moment, site = keys("dropout/7/5"), keys("x.random")
    first, second = (a ^ b for a, b in zip(moment, site, strict=True))
    expected = [
        splitmix(splitmix(first + i * 0x9E3779B97F4A7C15 & word) ^ second) >> 12 >= round(0.3 * 2**52)
        for i in range(5 * 7)
    ]
    found = Site("x.random").at(Moment.of(7, 5)).keep(0.3, (5, 7))
    assert found.flatten().tolist() == expected


@pytest.mark.quick
def test_kept_elements_are_scaled_and_evaluation_keeps_all() -> None:
    x = torch.randn(64, 64, dtype=torch.float64)
    random = Site("s").at(Moment.of(0, 0))
    out = dropout(x, 0.2, random)
    kept = random.keep(0.2, x.shape)
    assert torch.equal(out, torch.where(kept, x * (1 / 0.8), 0.0))
    assert dropout(x, 0.2, random, training=False) is x and dropout(x, 0.0, random) is x
    for p in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            dropout(x, p, random)
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            Dropout(p, "batch seq")


# Computed again in backward


class Recomputing(GPT):
    """Its blocks keep their inputs only; backward runs them again."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.drop(self.positions(self.embed(tokens)))
        for block in self.layers:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x, labels)


def recomputed(mesh: str, two_at_once: bool) -> float:
    """Largest error of a gradient against one device; the masks of both runs of each block must be the same."""
    model = dl.abstract(lambda: Recomputing(SMALL))
    p = dl.resolve(model, dl.plans.standard(), dl.Mesh.parse(mesh), batch=8, seq=SEQ, micro_batches=2, dtype="float64")
    step = dl.train_step(p, dl.sgd(lr=0.1), device="cpu")
    state = step.init(0)
    values, batch = gathered(state.parameters), random_batch(p, 0)
    with Kept() as masks:
        if two_at_once:
            # Both forwards before both backwards, as pipelines do.
            once = step.runner.module.forward
            waiting: list[Tensor] = []

            def forward(*args: Any, **kwargs: Any) -> Tensor:
                waiting.append(once(*args, **kwargs))
                if len(waiting) == 1:
                    return torch.zeros((), dtype=torch.float64, requires_grad=True)
                last, first = waiting.pop(), waiting.pop()
                return torch.stack([first, last]).sum()

            step.runner.module.forward = forward
        grads, *_ = step.gradients(state, parts(p, batch, step.device))
    for site, drawn in masks.items():
        blocks = site.startswith("layers.")
        assert len(drawn) == (4 if blocks else 2), site
        if blocks:
            first, second = (drawn[0], drawn[1]), (drawn[2], drawn[3])
            if two_at_once:
                assert {x.sum().item() for x in first} == {x.sum().item() for x in second}
            else:
                assert torch.equal(*first) and torch.equal(*second) and not torch.equal(first[0], second[0])
    tokens = (batch["labels"] != -100).sum()
    found = gathered({n: wrap(g / tokens, p.parameters[n].optimizer) for n, g in grads.items()})
    return worst(found, Reference(p, values).gradients(batch)[1])[0]


@pytest.mark.parametrize("two_at_once", [False, True])
@pytest.mark.parametrize("mesh", ["", "fsdp=2,tp=2"])
def test_a_forward_that_backward_computes_again_draws_the_same(mesh: str, two_at_once: bool) -> None:
    for error in pool(dl.Mesh.parse(mesh).size).run(recomputed, mesh, two_at_once):
        assert error < 1e-10


# Equality, the law, and what is refused


@pytest.mark.parametrize("run", [RUNS[9], RUNS[5], RUNS[3]], ids=lambda run: f"{run[0]}-{run[2]}")
def test_equal_to_one_device(run: tuple[str, Plan, int]) -> None:
    for report in pool(dl.Mesh.parse(run[0]).size).run(compared, *run):
        assert report.ok, report


def compared(*run: Any) -> Any:
    return compare(program(*run), steps=3, seed=2)


@pytest.mark.quick
def test_the_reference_really_drops() -> None:
    p = program("", dl.plans.standard(), 1)
    values = {n: torch.randn(q.storage.shape, dtype=torch.float64) for n, q in p.parameters.items()}
    batch = random_batch(p, 0)
    losses = []
    for seed, step in ((0, 0), (0, 1), (1, 0), (0, 0)):
        reference = Reference(p, values, seed)
        with reference.at(step):
            losses.append(reference.loss(batch).item())
    assert losses[0] == losses[3] and len(set(losses)) == 3
    model = Reference(p, values).model.eval()
    with drawing(model, Moment.of(0, 0)):
        assert model(**batch) == model(**batch)


class Shared(nn.Module):
    region = dl.Region({"tokens": "int batch seq", "labels": "int batch seq"}, "+batch +seq =", {"w": "embed"}, "batch")

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.w, self.drop, self.mistake = nn.Parameter(torch.ones(4)), Dropout(0.5, "batch seq embed"), mistake

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = tokens.unsqueeze(-1) * self.w
        if self.mistake == "twice":
            x = self.drop(self.drop(x))
        elif self.mistake == "torch":
            x = nn.functional.dropout(x, 0.5)
        elif self.mistake == "attention":
            q = x.unsqueeze(1)
            x = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).squeeze(1)
        return (x.sum(-1) * (labels != -100)).sum()


@pytest.mark.quick
@pytest.mark.parametrize(
    "mistake, said",
    [
        ("twice", "drop: draws random numbers (random) and is called 2 times in a step, each time the same: give every "
                  "call a module of its own"),
        ("torch", "is random, and would differ between ranks: use dtensor_lm.ops.Dropout, or dtensor_lm.ops.dropout "
                  "with an input 'random ...' of the region"),
        ("attention", "is random, and would differ between ranks"),
    ],
)  # fmt: skip
def test_what_would_draw_otherwise_is_refused(mistake: str, said: str) -> None:
    with pytest.raises((ModelError, dl.PlanError)) as error:
        dl.resolve(dl.abstract(lambda: Shared(mistake)), Plan({"batch": "dp"}), dl.Mesh(dp=2), batch=4, seq=4)
    assert said in str(error.value)


@pytest.mark.quick
def test_the_law_holds_with_dropout_and_sees_numbers_that_are_named_wrongly() -> None:
    model = dl.abstract(lambda: GPT(GPTConfig(vocab=12, embed=12, layers=1, heads=6, seq=12, dropout=0.5)))
    assert check_regions(model).ok
    wrong = Dropout(0.5, "batch res embed")
    wrong.region = dl.Region({"x": "batch res embed", "random": "random res batch embed"}, "batch res embed",
                             cuts="batch res embed")  # fmt: skip
    model.layers[0].mlp_drop = wrong
    with pytest.raises(ModelError, match=r"layers\.0\.mlp_drop cannot run alone"):
        check_regions(model)
    with pytest.raises(ModelError, match="random numbers of shape"):
        dl.resolve(model, dl.plans.standard(), dl.Mesh(tp=2), batch=6, seq=12)


@pytest.mark.quick
def test_dropout_as_an_option() -> None:
    core = dl.models.build("tiny-gpt", layers=1, dropout=0.3).layers[0].attention.core
    assert core.p == 0.3
    with pytest.raises(dl.errors.ConfigError, match=r"model 'tiny' cannot be changed so:\n  - it has no dropout"):
        dl.models.build("tiny", dropout=0.3)
    with pytest.raises(dl.errors.ConfigError, match=r"dropout is 1\.0: must be at least 0 and below 1"):
        CheckConfig(model="tiny-gpt", dropout=1.0).validate()


class Flat(nn.Module):
    """Draws for tokens whose batch and sequence are one dim, in the root by a name that only its parameter has."""

    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq", "random": "random (batch seq) embed"},
        outputs="+batch +seq =",
        params={"weight": "vocab embed"},
        cuts="batch embed",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seq, self.weight = SEQ, nn.Parameter(torch.empty(16, 4))
        nn.init.normal_(self.weight)

    def forward(self, tokens: Tensor, labels: Tensor, random: Random | None = None) -> Tensor:
        x = nn.functional.embedding(tokens.flatten(), self.weight)
        return (dropout(x, 0.5, random).square().sum(-1) * (labels.flatten() != -100)).sum()


def flat() -> nn.Module:
    return dl.abstract(Flat)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("mesh", ["", "dp=2"])
def test_rows_that_share_a_dim_with_positions(mesh: str, micro: int) -> None:
    assert assert_equivalent(
        flat(), Plan({"batch": "dp"}), dl.Mesh.parse(mesh), batch=6, seq=SEQ, micro_batches=micro, steps=2
    )


class Late(Flat):
    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq", "random": "random batch res embed"},
        outputs="+batch +seq =",
        params={"weight": "vocab embed"},
        cuts="batch",
    )

    def __init__(self) -> None:
        super().__init__()
        self.drop = Dropout(0.5, "batch res embed")

    def forward(self, tokens: Tensor, labels: Tensor, random: Random | None = None) -> Tensor:
        x = self.drop(nn.functional.embedding(tokens, self.weight))
        return (dropout(x, 0.5, random).square().sum(-1) * (labels != -100)).sum()


class Swapped(Flat):
    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq", "random": "random (seq batch) embed"},
        outputs="+batch +seq =",
        params={"weight": "vocab embed"},
    )
    batch = 1


def test_a_name_that_an_inner_region_brings() -> None:
    model = dl.abstract(Late)
    assert check_regions(model).ok
    assert assert_equivalent(model, Plan({"batch": "dp"}), dl.Mesh(dp=2), batch=4, seq=SEQ, micro_batches=2, steps=0)


@pytest.mark.quick
def test_names_that_random_numbers_cannot_have() -> None:
    with pytest.raises(dl.PlanError, match=r"rows of a micro-batch are not together in 'random \(seq batch\) embed'"):
        dl.resolve(dl.abstract(Swapped), Plan(), dl.Mesh(), batch=1, seq=SEQ)
    for names in ("batch (heads head_dim)", "batch +seq", "batch ="):
        with pytest.raises(ValueError, match="write names of dims"):
            Dropout(0.5, names)
    with pytest.raises(ValueError, match="a number, at least 0 and below 1"):
        Dropout("0.1", "batch")
