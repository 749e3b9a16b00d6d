"""Initial values: equal on every shard, distributed like torch's own, refused where replay is impossible."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.init import orthogonal_, trunc_normal_

from dtensor_lm.errors import ModelError
from dtensor_lm.initial_values import FIX, Op, Recipe, abstract, draw, recipes

pytestmark = pytest.mark.quick

NORMAL = Recipe((Op("normal", (0.0, 1.0)),))
UNIFORM = Recipe((Op("uniform", (0.0, 1.0)),))
TRUNCATED = Recipe((Op("trunc_normal", (0.1, 0.5, -0.7, 1.2)), Op("mul", (3.0,))))


class One(nn.Module):
    """A module with the single parameter `w`, and `init` run on it."""

    def __init__(self, w: torch.Tensor, init: Callable[[torch.Tensor], object] = lambda w: None) -> None:
        super().__init__()
        self.w = nn.Parameter(w)
        with torch.no_grad():
            init(self.w)


def whole(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(0, n) for n in shape]


def values(recipe: Recipe, shape: tuple[int, ...], name: str = "w", seed: int = 0) -> torch.Tensor:
    return draw(recipe, name, seed, shape, whole(shape), torch.float32)


def cuts(n: int, parts: int) -> list[tuple[int, int]]:
    """`parts` ranges as a sharded dim has them: the last ones smaller, or empty."""
    size = -(-n // parts)
    return [(min(i * size, n), min((i + 1) * size, n)) for i in range(parts)]


# ---- shards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [NORMAL, UNIFORM, TRUNCATED], ids=["normal", "uniform", "truncated"])
@pytest.mark.parametrize("parts", [(1, 8), (8, 1), (2, 4), (3, 5), (7, 1), (1, 7), (13, 9), (400, 1)])
def test_shards_concatenate_bitwise_to_the_whole(recipe: Recipe, parts: tuple[int, int]) -> None:
    shape = (301, 517)  # more than one slab, and no divisor in common with the parts
    rows = [
        torch.cat([draw(recipe, "w", 0, shape, [r, c], torch.float32) for c in cuts(shape[1], parts[1])], 1)
        for r in cuts(shape[0], parts[0])
    ]
    assert torch.equal(torch.cat(rows), values(recipe, shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_boxes_of_many_dims(dtype: torch.dtype) -> None:
    shape = (3, 5, 70, 401)
    full = draw(NORMAL, "w", 0, shape, whole(shape), dtype)
    assert full.dtype == dtype
    for box in (
        [(1, 3), (0, 5), (0, 70), (0, 401)],
        [(0, 3), (2, 3), (0, 70), (0, 401)],
        [(0, 3), (1, 5), (3, 69), (0, 401)],
        [(2, 3), (4, 5), (69, 70), (400, 401)],
        [(0, 3), (0, 5), (11, 60), (7, 300)],
    ):
        got = draw(NORMAL, "w", 0, shape, box, dtype)
        assert torch.equal(got, full[tuple(slice(*side) for side in box)])


def test_long_rows_are_cut_too() -> None:
    shape = (2, 3, 150_001)
    full = values(NORMAL, shape)
    got = draw(NORMAL, "w", 0, shape, [(1, 2), (0, 2), (77, 149_999)], torch.float32)
    assert torch.equal(got, full[1:2, 0:2, 77:149_999])


def test_empty_boxes_and_scalars() -> None:
    assert draw(NORMAL, "w", 0, (4, 6), [(2, 2), (0, 6)], torch.float32).shape == (0, 6)
    assert draw(NORMAL, "w", 0, (0, 6), [(0, 0), (0, 6)], torch.float32).shape == (0, 6)
    assert draw(NORMAL, "w", 0, (), [], torch.float32).shape == ()
    assert draw(NORMAL, "w", 0, (), [], torch.float32) == values(NORMAL, (1,))[0]


def test_dims_of_billions_of_elements() -> None:
    shape = (7_000_000_000, 3)
    last = draw(UNIFORM, "w", 0, shape, [(shape[0] - 2, shape[0]), (0, 3)], torch.float64)
    assert torch.equal(last[1], draw(UNIFORM, "w", 0, shape, [(shape[0] - 1, shape[0]), (0, 3)], torch.float64)[0])
    low = draw(UNIFORM, "w", 0, shape, [((shape[0] - 2) % 2**32, (shape[0] - 2) % 2**32 + 1), (0, 3)], torch.float64)
    assert not torch.equal(last[:1], low)  # the index is not cut to 32 bits


def test_threads_do_not_matter() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = values(TRUNCATED, (500, 701))
        torch.set_num_threads(2)
        assert torch.equal(one, values(TRUNCATED, (500, 701)))
    finally:
        torch.set_num_threads(threads)


def reference(seed: int, name: str, draw_number: int, index: int) -> float:
    """The uniform of one element, written again with Python's integers."""
    digest = hashlib.blake2b(f"{seed}/{draw_number}/{name}".encode(), digest_size=16).digest()
    z = index * 0x9E3779B97F4A7C15
    for key, combine in ((digest[:8], int.__add__), (digest[8:], int.__xor__)):
        z = combine(z, int.from_bytes(key, "little")) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z ^= z >> 31
    return ((z >> 12) + 0.5) / 2**52


def test_the_stream_is_the_written_down_one() -> None:
    """A change of the stream changes the start of every run: it must be deliberate."""
    shape, name = (5_000_000_000, 4), "model.embed.weight"
    for row in (0, 1, 2**31, 4_999_999_998):
        got = draw(UNIFORM, name, 7, shape, [(row, row + 2), (1, 4)], torch.float64)
        want = [[reference(7, name, 0, (row + i) * 4 + j) for j in (1, 2, 3)] for i in (0, 1)]
        assert got.tolist() == want
    got = values(NORMAL, (3,), name, 7)
    assert got.tolist() == pytest.approx([0.7585115432739258, -1.6331912279129028, -0.9918990731239319])


def test_a_box_outside_the_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"w: box \[\(0, 5\)\] is not inside shape \(4,\)"):
        draw(NORMAL, "w", 0, (4,), [(0, 5)], torch.float32)


# ---- statistics --------------------------------------------------------------------------------------------

N = 1 << 20
SIGMA = 5.0  # every bound below is this many standard errors; the values are fixed by the seed


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return (((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std())).item()


def test_normal_moments() -> None:
    x = values(NORMAL, (1024, 1024)).double()
    assert abs(x.mean().item()) < SIGMA / math.sqrt(N)
    assert abs(x.std().item() - 1) < SIGMA / math.sqrt(2 * N)
    assert abs((x**3).mean().item()) < SIGMA * math.sqrt(15 / N)
    assert abs((x**4).mean().item() - 3) < SIGMA * math.sqrt(96 / N)
    assert 4.5 < x.abs().max().item() < 7


@pytest.mark.parametrize("bins", [2, 256, 1000])
def test_uniforms_are_flat(bins: int) -> None:
    u = values(UNIFORM, (1024, 1024)).double()
    expected = N / bins
    chi2 = ((torch.histc(u, bins, 0, 1) - expected) ** 2 / expected).sum().item()
    assert abs(chi2 - (bins - 1)) < SIGMA * math.sqrt(2 * (bins - 1))


def test_pairs_of_neighbours_are_flat() -> None:
    u = values(UNIFORM, (1024, 1024)).double()
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
        cell = (a * 16).long() * 16 + (b * 16).long()
        count = torch.bincount(cell.flatten(), minlength=256).double()
        expected = count.sum() / 256
        assert abs(((count - expected) ** 2 / expected).sum().item() - 255) < SIGMA * math.sqrt(510)


@pytest.mark.parametrize("lag", [1, 2, 1024, 4096])
def test_neighbours_are_independent(lag: int) -> None:
    x = values(NORMAL, (1024, 1024)).flatten()
    assert abs(correlation(x[lag:], x[:-lag])) < SIGMA / math.sqrt(N)


def test_names_seeds_and_draws_are_independent_streams() -> None:
    twice = Recipe((Op("normal", (0.0, 1.0)), Op("normal", (0.0, 1.0))))
    shape, bound = (512, 512), SIGMA / 512
    streams = [
        values(NORMAL, shape, "a", 0),
        values(NORMAL, shape, "b", 0),
        values(NORMAL, shape, "a", 1),
        values(twice, shape, "a", 0),
    ]
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert abs(correlation(a, b)) < bound
            assert abs(correlation(a.flatten()[1:], b.flatten()[:-1])) < bound
            assert not torch.isin(a, b).float().mean() > 0.1  # no window of one stream is in the other


# ---- torch's own initialisers ------------------------------------------------------------------------------

SHAPE = (256, 512)


def times(w: torch.Tensor) -> None:
    w.normal_().mul_(0.02).add_(0.5).div_(2).sub_(0.1).clamp_(0.1, 0.2)


def by_erfinv(w: torch.Tensor) -> None:
    w.uniform_(-0.9, 0.9).erfinv_().mul_(0.3)


IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "normal_": lambda w: nn.init.normal_(w, 0.3, 0.02),
    "uniform_": lambda w: nn.init.uniform_(w, -0.3, 0.1),
    "uniform_ defaults": lambda w: w.uniform_(),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "trunc_normal_ cut": lambda w: trunc_normal_(w, 0.1, 1.0, -0.5, 1.5),
    "trunc_normal_ narrow": lambda w: trunc_normal_(w, 0.0, 1.0, 1.0, 1.2),
    "trunc_normal_ tail": lambda w: trunc_normal_(w, 0.0, 1.0, 1.5, 4.0),
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": lambda w: nn.init.xavier_normal_(w, gain=2.0),
    "ones_": nn.init.ones_,
    "zeros_": lambda w: nn.init.zeros_(w),
    "constant_": lambda w: nn.init.constant_(w, 0.37),
    "scalars": times,
    "erfinv_": by_erfinv,
    "through a view of all": lambda w: w.view(-1).normal_(0, 0.3),
    "through data": lambda w: w.data.t().uniform_(-1, 2),
    "overwritten": lambda w: (w[0].zero_(), w.normal_(0, 0.2)),
    "overwritten orthogonal_": lambda w: (orthogonal_(w), w.normal_(0, 0.2)),
}

CREATED: dict[str, Callable[[], torch.Tensor]] = {
    "randn * 0.02": lambda: torch.randn(SHAPE) * 0.02,
    "rand, both sides": lambda: 1 - (2 * torch.rand(SHAPE) - 0.5) / 3,
    "zeros": lambda: torch.zeros(SHAPE),
    "ones": lambda: -torch.ones(SHAPE),
    "full": lambda: torch.full(SHAPE, 0.2),
    "randn_like": lambda: torch.randn_like(torch.empty(SHAPE)).clone().clamp(min=0.1),
    "add with alpha": lambda: torch.randn(SHAPE).add(2, alpha=0.5),
    "transposed": lambda: torch.randn(SHAPE[::-1]).t(),
    "log": lambda: torch.log(torch.rand(SHAPE) + 1),
    "bfloat16": lambda: torch.randn(SHAPE, dtype=torch.float64).to(torch.bfloat16),
}


def compare(build: Callable[[], nn.Module]) -> None:
    """Every parameter has the moments, range and quantiles of torch's own values."""
    model = abstract(build)
    found = recipes(model)
    torch.manual_seed(0)
    own = dict(build().named_parameters())
    assert list(found) == list(own)
    for name, parameter in own.items():
        x = draw(found[name], name, 0, tuple(parameter.shape), whole(tuple(parameter.shape)), torch.float64).flatten()
        y = parameter.detach().double().flatten()
        # Six standard errors of the difference of two samples, plus the rounding of torch's own dtype.
        spread, noise = y.std().item() if y.numel() > 1 else 0.0, 6 * math.sqrt(2 / y.numel())
        rounding = 0.01 * (spread + 1) if parameter.dtype == torch.bfloat16 else 1e-6
        assert abs(x.mean() - y.mean()) <= noise * spread + rounding, name
        if y.numel() < 1000:
            assert (x.min() >= y.min() - 0.5 * spread) and (x.max() <= y.max() + 0.5 * spread), name
            continue
        assert abs(x.std() - spread) <= 2 * noise * spread + rounding, name
        # Kolmogorov-Smirnov, coefficient 2.2: once in 8000 by chance for continuous values.
        if spread > 0:
            points = torch.linspace(y.min().item() - 1e-6, y.max().item() + 1e-6, 200, dtype=torch.float64)
            below = [torch.searchsorted(v.sort().values, points, right=True) / v.numel() for v in (x, y)]
            assert (below[0] - below[1]).abs().max() < 2.2 * math.sqrt(2 / y.numel()) + rounding, name
            assert (x.min() - y.min()).abs() < spread and (x.max() - y.max()).abs() < spread, name
        else:
            assert torch.allclose(x, y, rtol=1e-6), name


@pytest.mark.parametrize("init", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_in_place_initialisers_match_torch(init: Callable[[torch.Tensor], object]) -> None:
    compare(lambda: One(torch.empty(SHAPE), init))


@pytest.mark.parametrize("create", CREATED.values(), ids=CREATED.keys())
def test_created_values_match_torch(create: Callable[[], torch.Tensor]) -> None:
    compare(lambda: One(create()))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(256, 512),
        lambda: nn.Embedding(256, 512),
        lambda: nn.LayerNorm(512),
        lambda: nn.RMSNorm(512),
        lambda: nn.MultiheadAttention(64, 4),
        lambda: nn.Linear(64, 512).to(torch.bfloat16),
        lambda: nn.Conv2d(32, 64, 3),
    ],
    ids=["Linear", "Embedding", "LayerNorm", "RMSNorm", "MultiheadAttention", "bfloat16", "Conv2d"],
)
def test_module_defaults_match_torch(build: Callable[[], nn.Module]) -> None:
    compare(build)


@pytest.mark.parametrize(("mean", "low", "high"), [(0.0, -2.0, 2.0), (0.0, 5.0, 9.0), (0.5, -8.0, -6.0)])
def test_truncated_normal_stays_inside_and_is_finite(mean: float, low: float, high: float) -> None:
    found = recipes(abstract(lambda: One(torch.empty(1000, 100), lambda w: trunc_normal_(w, mean, 1.0, low, high))))
    x = values(found["w"], (1000, 100))
    assert low <= x.min() and x.max() <= high
    inner = high if abs(high - mean) < abs(low - mean) else low
    assert (x - inner).abs().min() < 1e-3 and x.std() > 0.05


# ---- which recipe belongs to which tensor ------------------------------------------------------------------


def test_the_recipe_is_what_was_written_last() -> None:
    found = recipes(abstract(lambda: One(torch.randn(3, 4), lambda w: (w.uniform_(), w.normal_(0, 2).mul_(3)))))
    assert found["w"] == Recipe((Op("normal", (0.0, 2.0)), Op("mul", (3.0,))))


def test_tied_parameters_have_the_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    model = abstract(Tied)
    assert recipes(model) == {"embed.weight": Recipe((Op("normal", (0.0, 1.0)),))}
    assert all(parameter.is_meta for parameter in model.parameters())


def test_buffers_are_recorded_too() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("scale", torch.ones(3) * 2, persistent=False)
            self.register_buffer("absent", None)

    found = recipes(abstract(Buffers))
    assert draw(found["count"], "count", 0, (), [], torch.long) == 0
    assert draw(found["scale"], "scale", 0, (3,), [(1, 3)], torch.float32).tolist() == [2.0, 2.0]
    assert "absent" not in found


def test_many_temporaries_do_not_mix_storages() -> None:
    """The id of a freed storage must not come back for another tensor."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList()
            for i in range(200):
                torch.randn(3, 4).mul_(i)
                self.all.append(nn.Parameter(torch.empty(3, 4)))
                torch.empty(3, 4).fill_(-1)

    with pytest.raises(ModelError) as error:
        recipes(abstract(Many))
    assert len(error.value.faults) == 200


def test_a_replaced_storage_is_not_freed() -> None:
    """`tensor.data = ...` lets go of a storage, whose id may then come back for a tensor given as data."""

    class Replaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList()
            for _ in range(50):
                w = torch.ones(4)
                w.data = torch.zeros(4)
                self.all.append(nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0])))

    with pytest.raises(ModelError) as error:
        recipes(abstract(Replaced))
    assert len(error.value.faults) == 50


def test_recording_ends_with_abstract() -> None:
    model = abstract(lambda: nn.Linear(3, 4))
    nn.init.zeros_(model.get_parameter("weight"))
    assert recipes(model)["weight"].ops[0].name == "uniform"
    assert torch.empty(1).device.type == "cpu" and torch.empty(1, device="meta").is_meta


# ---- refused by name ---------------------------------------------------------------------------------------


class Copied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 4))
        self.w = copy.deepcopy(self.a)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 4))
        self.w = nn.Parameter(self.a.t())


def one(init: Callable[[torch.Tensor], object]) -> Callable[[], nn.Module]:
    return lambda: One(torch.randn(6, 6), init)


STEPWISE = "cannot be replayed element by element"
PART = "(a view or a slice)"
DATA = "its values are given as data (torch.tensor, numpy, an outer tensor), and meta keeps no data"
OUTER = torch.ones(6, 6, device="meta")

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "copy_": (one(lambda w: w.copy_(torch.zeros(6, 6))), f"copy_ {STEPWISE}"),
    "tensor argument": (one(lambda w: w.mul_(torch.ones(6, 1))), f"mul_ {STEPWISE}"),
    "fill_ by a tensor": (one(lambda w: w.fill_(torch.ones(()))), f"fill_ {STEPWISE}"),
    "index": (
        one(lambda w: w.index_fill_(0, torch.zeros(1, dtype=torch.long), 0.0)),
        f"index_fill_ {STEPWISE}",
    ),
    "masked": (one(lambda w: w.masked_fill_(torch.ones(6, 6).bool(), 1.0)), f"masked_fill_ {STEPWISE}"),
    "random_": (one(lambda w: w.random_(3)), f"random_ {STEPWISE}"),
    "slice": (one(lambda w: w[0].zero_()), f"zero_ writes only a part of it {PART}"),
    "setitem": (one(lambda w: w.__setitem__(0, 1.0)), f"copy_ {STEPWISE}"),
    "orthogonal_": (one(orthogonal_), f"nn.init.orthogonal_ {STEPWISE}"),
    "sparse_": (one(lambda w: nn.init.sparse_(w, 0.5)), f"nn.init.sparse_ {STEPWISE}"),
    "eye_": (one(nn.init.eye_), f"eye {STEPWISE}"),
    "foreach": (one(lambda w: torch._foreach_mul_([w], 2.0)), f"_foreach_mul_ {STEPWISE}"),
    "rounding": (one(lambda w: w.div_(2, rounding_mode="floor")), f"div_ {STEPWISE}"),
    "dirac_": (lambda: One(torch.empty(3, 3, 3), nn.init.dirac_), f"nn.init.dirac_ {STEPWISE}"),
    "qr": (lambda: One(torch.linalg.qr(torch.randn(4, 4))[0]), f"linalg_qr {STEPWISE}"),
    "arange": (lambda: One(torch.arange(4.0)), f"arange {STEPWISE}"),
    "two tensors": (lambda: One(torch.randn(4) + torch.randn(4)), f"add {STEPWISE}"),
    "cat": (lambda: One(torch.cat([torch.randn(4), torch.zeros(4)])), f"cat {STEPWISE}"),
    "after a refusal": (lambda: One(torch.arange(4.0) * 2), f"arange {STEPWISE}"),
    "part of a tensor": (lambda: One(torch.randn(4, 4)[0]), f"it is only a part of another tensor {PART}"),
    "clone of a part": (
        lambda: One(torch.randn(4, 4)[0].clone()),
        f"clone takes only a part of another tensor {PART}",
    ),
    "empty": (lambda: One(torch.empty(4)), "empty leaves it without values, and nothing writes them"),
    "empty, scaled": (
        lambda: One(torch.empty(4), lambda w: w.mul_(2)),
        "empty leaves it without values, and nothing writes them",
    ),
    "data": (lambda: One(torch.tensor([1.0, 2.0])), DATA),
    "scaled data": (lambda: One(torch.tensor([1.0, 2.0]), lambda w: w.mul_(2)), DATA),
    "outer tensor": (lambda: One(OUTER), DATA),
    "another device": (lambda: One(torch.ones(4, device="cpu")), "it was created on cpu, not on meta"),
    "deepcopy": (Copied, "it copies the random values of a"),
    "shared memory": (Shared, "it shares the memory of a without being the same parameter"),
    "complex": (
        lambda: One(torch.randn(4, dtype=torch.complex64)),
        "normal in torch.complex64 cannot be replayed (values are computed in float64)",
    ),
    "no room": (
        lambda: One(torch.empty(4), lambda w: trunc_normal_(w, 0.0, 0.1, 5.0, 6.0)),
        "nn.init.trunc_normal_ with mean 0, std 0.1 has no values between 5 and 6",
    ),
}


# Before torch 2.13 these initialisers run as plain operators on the meta device: three are refused under the name of
# one of those, and a truncation without room is replayed as it was written.
OLDER = {"orthogonal_": "copy_", "sparse_": "index_put_", "dirac_": "copy_", "no room": ""}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replayed_is_refused_by_name(case: str) -> None:
    build, reason = REFUSED[case]
    model = abstract(build)
    if case in OLDER and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        if not OLDER[case]:
            assert recipes(model)
            return
        reason = reason.replace(f"nn.init.{case}", OLDER[case])
    with pytest.raises(ModelError) as error:
        recipes(model)
    title = f"{type(model).__name__} has initial values that cannot be reproduced"
    assert str(error.value) == f"{title}\n  - parameter w: {reason}; {FIX}"


def test_all_refusals_are_shown_together() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4, padding_idx=0)
            self.fine = nn.Linear(4, 4)
            self.lazy = nn.LazyLinear(4, bias=False)
            self.register_buffer("angle", torch.arange(4.0), persistent=False)

    with pytest.raises(ModelError) as error:
        recipes(abstract(Two))
    assert str(error.value) == (
        "Two has initial values that cannot be reproduced\n"
        f"  - parameter embed.weight: fill_ writes only a part of it (a view or a slice); {FIX}\n"
        f"  - parameter lazy.weight: it was created in a lazy module, without a shape; {FIX}\n"
        f"  - buffer angle: arange cannot be replayed element by element; {FIX}"
    )


def test_models_that_abstract_did_not_build_are_refused() -> None:
    with pytest.raises(ModelError) as error:
        recipes(nn.Linear(3, 4))
    assert str(error.value) == "Linear has no recorded initial values\n  - build it by abstract(...)"
    model = abstract(lambda: nn.Linear(3, 4))
    model.late = nn.Parameter(torch.ones(3))
    with pytest.raises(ModelError, match=r"parameter late: it was added after abstract\(\.\.\.\)"):
        recipes(model)
    with pytest.raises(ModelError, match=r"build returned a int, not an nn\.Module"):
        abstract(lambda: 3)  # type: ignore[arg-type, return-value]


def test_drawing_a_refused_recipe_is_an_error() -> None:
    with pytest.raises(ModelError, match="w: qr"):
        draw(Recipe(refusal="qr"), "w", 0, (3,), [(0, 3)], torch.float32)
