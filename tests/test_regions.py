"""The law of regions: the models obey it, and every planted fault is found, named and given its repair."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor_lm import models
from dtensor_lm.errors import ModelError
from dtensor_lm.initial_values import abstract
from dtensor_lm.models.llama import MLP, Attention, AttentionCore, LlamaConfig, VocabularyLoss
from dtensor_lm.ops import causal_attention
from dtensor_lm.region import Region, is_region, signature
from dtensor_lm.testing import Report, check_regions
from dtensor_lm.testing.exchange import SECONDS
from dtensor_lm.testing.law import GRADIENTS
from dtensor_lm.testing.recording import real_copy

pytestmark = [pytest.mark.quick]

SHAPE: dict[str, Any] = {"embed": 32, "ffn": 24, "vocab": 48}
CONFIG = LlamaConfig(48, 32, layers=1, heads=8, kv_heads=4, ffn=24, label_smoothing=0.1, z_loss=0.01)


def with_region(cls: type[nn.Module], region: Region) -> type[nn.Module]:
    return type(cls.__name__, (cls,), {"region": region})


def edited(cls: Any, **changes: Any) -> type[nn.Module]:
    """The class with some fields of its region replaced; fields are given as texts."""
    old: Region = cls.region
    region = Region({}, changes.pop("outputs", ()), changes.pop("params", None), changes.pop("cuts", ""))
    new = Region({}, ())
    new.inputs, new.single, new.outputs = old.inputs, old.single, region.outputs or old.outputs
    new.params, new.cuts = {**old.params, **region.params}, region.cuts or old.cuts
    return with_region(cls, new)


def found(report: Report) -> set[tuple[str, str, str]]:
    """(region, cut, tensor) of every violation."""
    return {(v.region, v.cut, v.tensor) for v in report.violations}


def hints(report: Report) -> set[str]:
    return {v.hint for v in report.violations}


def cuts(report: Report) -> set[tuple[str, str]]:
    return {(region, cut) for region, cut, _ in report.checked}


# ---- models that obey --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 2},
        {"layers": 1, "tied": True},
        {"layers": 1, "label_smoothing": 0.1, "z_loss": 0.01},
        {"layers": 1, "heads": 8, "kv_heads": 8, "rope_scaling": models.SHAPES["llama3-8b"].rope_scaling},
    ],
    ids=["two layers", "tied", "smoothing and z-loss", "full kv heads"],
)
def test_llama_is_lawful_for_every_declared_cut(changes: dict[str, Any]) -> None:
    model = models.build("tiny", **{**SHAPE, **changes})
    report = check_regions(model)
    assert report.ok, str(report)
    declared = {
        (path, "+".join(sorted(cut)))
        for path, module in model.named_modules()
        if is_region(module) and path not in report.same
        for cut in signature(module).cuts
    }
    assert cuts(report) == declared and not report.unchecked


def test_each_cut_is_made_in_two_three_and_as_many_parts_as_possible() -> None:
    report = check_regions(models.build("tiny", layers=1, **SHAPE))
    numbers = {(r, c): [k for region, cut, k in report.checked if (region, cut) == (r, c)] for r, c in cuts(report)}
    assert numbers["", "batch"] == [2, 3, 6]
    assert numbers["layers.0.attention", "seq"] == [2, 3, 12]
    assert numbers["layers.0.attention", "heads"] == [2, 8]
    assert numbers["layers.0.attention", "heads+kv_heads"] == [2, 4]
    assert numbers["layers.0.mlp", "ffn"] == [2, 3, 24]
    assert numbers["head.loss", "vocab"] == [2, 3, 48]
    some = check_regions(models.build("tiny", layers=1, **SHAPE), ks=(4,), sizes={"batch": 4, "seq": 8})
    assert {k for _, _, k in some.checked} == {4} and some.ok


def test_equal_layers_are_checked_once_and_different_ones_each() -> None:
    model = models.build("tiny", layers=3, **SHAPE)
    report = check_regions(model)
    assert report.same["layers.2.attention.core"] == "layers.0.attention.core"
    assert "layers.1 is the same as layers.0" in str(report)
    model.get_submodule("layers.1.attention.core").window = 4
    report = check_regions(model)
    assert "layers.1.attention.core" not in report.same and "layers.1.mlp" in report.same
    assert report.same["layers.2"] == "layers.0"


def test_multi_query_heads_find_their_kv_head_by_index() -> None:
    report = check_regions(models.build("tiny", layers=1, kv_heads=1, **SHAPE))
    assert report.ok, str(report)
    assert ("layers.0.attention.core", "core_heads", 8) in report.checked
    assert ("layers.0.attention.core", "core_heads+core_kv_heads") in report.unchecked
    assert "not checked: layers.0.attention: kv_heads: no k divides it" in str(report)


def test_every_parameter_is_random_and_ties_stay() -> None:
    real = real_copy(models.build("tiny", layers=1, tied=True, **SHAPE), torch.Generator().manual_seed(0))
    assert all(p.dtype == torch.float64 and len(p.unique()) == p.numel() for p in real.parameters())
    assert real.get_parameter("head.loss.weight") is real.get_parameter("embed.weight")


def test_real_model_is_not_changed_and_batch_is_taken() -> None:
    torch.manual_seed(0)
    model = models.Llama(models.config("tiny", layers=1, **SHAPE))
    before = {n: p.clone() for n, p in model.named_parameters()}
    batch = {"tokens": torch.randint(0, 48, (4, 6)), "labels": torch.randint(0, 48, (4, 6))}
    report = check_regions(model, batch)
    assert report.ok and ("", "batch", 4) in report.checked and ("", "seq", 6) in report.checked
    assert all(p.dtype == torch.float32 and torch.equal(p, before[n]) for n, p in model.named_parameters())


# ---- planted faults ----------------------------------------------------------------------------------------


def test_missing_sum_of_the_output() -> None:
    report = check_regions(edited(Attention, outputs="batch seq embed -> batch res embed", cuts="heads")(CONFIG))
    assert ("", "heads", "output 0") in found(report)
    assert hints(report) == {"add +heads to output 0"}
    assert "the model: heads cut by 2: output 0: off by " in str(report)


def test_a_bundle_gets_the_hint_of_its_names() -> None:
    cuts = "heads kv_heads heads+kv_heads"
    report = check_regions(edited(Attention, outputs="batch seq embed -> batch res embed", cuts=cuts)(CONFIG))
    assert {(v.cut, v.hint) for v in report.violations} == {
        ("heads", "add +heads to output 0"),
        ("heads+kv_heads", "add +heads to output 0"),
    }


class Redundant(nn.Module):
    """Its second output has nothing to do with heads."""

    region = Region(
        {"x": "batch embed"},
        ("batch heads", "batch embed +heads"),
        {"up.weight": "heads embed"},
        "batch heads",
    )

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.up(x), x.square()


def test_sum_that_is_none() -> None:
    report = check_regions(Redundant())
    assert found(report) == {("", "heads", "output 1"), ("", "heads", "grad x")}
    assert hints(report) == {"remove +heads from output 1"}


class BiasedMLP(nn.Module):
    region = Region(
        {"x": "batch seq embed"},
        "batch seq embed +ffn",
        {"up.weight": "ffn embed", "up.bias": "ffn", "down.weight": "embed ffn", "down.bias": "embed"},
        "batch seq ffn",
    )

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def test_row_bias_enters_once() -> None:
    report = check_regions(BiasedMLP())
    assert {(cut, tensor) for _, cut, tensor in found(report)} == {
        ("ffn", "output 0"),
        ("ffn", "grad down.bias"),
    }
    assert hints(report) == {"add +ffn to down.bias"}
    assert check_regions(edited(BiasedMLP, params={"down.bias": "embed +ffn"})()).ok


class GroupedCore(AttentionCore):
    """Grouped heads without indices: the parts must match one to one."""

    region = Region(
        {
            "q": "batch seq heads head_dim",
            "k": "batch seq kv_heads head_dim",
            "v": "batch seq kv_heads head_dim",
        },
        "batch seq heads head_dim",
        cuts="batch kv_heads heads+kv_heads seq",
    )

    def __init__(self) -> None:
        super().__init__(group=2)


def test_unlawful_cuts_are_named_with_what_is_lawful_instead() -> None:
    report = check_regions(GroupedCore(), sizes={"heads": 8, "kv_heads": 4, "head_dim": 4})
    assert {cut for _, cut, _ in found(report)} == {"kv_heads", "seq"}
    assert hints(report) == {"remove kv_heads from cuts: lawful as heads+kv_heads", "remove seq from cuts"}
    (alone,) = {(v.tensor, v.detail) for v in report.violations if v.cut == "kv_heads" and v.k == 2}
    assert alone == ("code", "ValueError: 8 query heads and 2 kv heads in groups of 2 need their indices")


class ChunkedCore(nn.Module):
    """Attention inside chunks of 4 positions, by a local size."""

    region = Region({"q": "batch seq heads head_dim"}, "batch seq heads head_dim", cuts="batch heads seq")

    def forward(self, q: Tensor) -> Tensor:
        chunk = min(4, q.shape[1])
        parts = q.unflatten(1, (-1, chunk)).flatten(0, 1)
        return causal_attention(parts, parts, parts, 1).unflatten(0, (q.shape[0], -1)).flatten(1, 2)


def test_lawful_in_two_parts_is_not_lawful() -> None:
    report = check_regions(ChunkedCore(), sizes={"seq": 8, "heads": 2, "head_dim": 4}, ks=(2, 4))
    assert {(v.cut, v.k, v.tensor) for v in report.violations} == {
        ("seq", 4, "output 0"),
        ("seq", 4, "grad q"),
    }
    assert hints(report) == {"remove seq from cuts: it is lawful in 2 parts only"}


class MeanLoss(nn.Module):
    region = Region({"x": "batch seq embed"}, "+batch +seq", {"weight": "embed"}, "batch seq")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).square().mean((0, 1))


def test_local_size() -> None:
    report = check_regions(MeanLoss())
    assert found(report) == {("", c, t) for c in ("batch", "seq") for t in ("output 0", "grad x", "grad weight")}
    mean = "(or is an output a mean over it? a loss is the sum over tokens)"
    assert hints(report) == {f"remove batch from cuts {mean}", f"remove seq from cuts {mean}"}


class Scaled(nn.Module):
    """A learned scale of a tensor that is cut and of one that is whole."""

    region = Region(
        {"q": "batch heads", "k": "batch kv_heads"},
        ("batch heads", "batch kv_heads"),
        {"scale": "_"},
        "heads",
    )

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q * self.scale, k * self.scale


def test_scale_of_cut_and_whole() -> None:
    """Lawful, because the whole output's cotangent comes as addends; as `=` it would be counted k times."""
    sizes = {"heads": 12, "kv_heads": 3}
    assert check_regions(Scaled(), sizes=sizes).ok
    report = check_regions(edited(Scaled, outputs=("batch heads", "batch kv_heads ="))(), sizes=sizes)
    assert found(report) == {("", "heads", "grad scale"), ("", "heads", "grad k")}
    assert hints(report) == {"take = off output 1"}


class Crooked(nn.Module):
    """Right values, and right gradients only if the parts happen to get equal addends of the cotangent."""

    region = Region({"x": "batch embed", "q": "batch heads", "index": "index heads"}, "batch embed", cuts="heads")

    def forward(self, x: Tensor, q: Tensor, index: Tensor | None = None) -> Tensor:
        if index is None:
            return x
        factor = 12 / len(index) if index[0] == 0 else 0
        return x.detach() + factor * (x - x.detach())


def test_equal_outputs_get_addends_that_differ() -> None:
    report = check_regions(Crooked(), sizes={"heads": 12, "embed": 8})
    assert found(report) == {("", "heads", "grad x")}


def test_the_law_that_copies_whole_cotangents_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRADIENTS, "R", "copies")
    assert not check_regions(Scaled(), sizes={"heads": 12, "kv_heads": 3}).ok


def test_loss_over_a_cut_vocabulary_must_say_that_it_is_whole() -> None:
    labels = torch.randint(0, 48, (6, 12), generator=torch.Generator().manual_seed(0))
    batch = {"x": torch.randn(6, 12, 32), "labels": labels}
    assert check_regions(VocabularyLoss(CONFIG), batch).ok
    report = check_regions(edited(VocabularyLoss, outputs="+batch +seq")(CONFIG), batch)
    assert found(report) == {("", "vocab", "grad x"), ("", "vocab", "grad weight")}
    assert hints(report) == {"mark output 0 with ="}


class LocalLoss(VocabularyLoss):
    """Forgets the other parts of the vocabulary."""

    def forward(self, x: Tensor, labels: Tensor | None, index: Any = None, parts: Any = None) -> Tensor:
        return super().forward(x, labels, index, None)


def test_loss_that_forgets_the_other_parts() -> None:
    report = check_regions(LocalLoss(CONFIG))
    assert {v.cut for v in report.violations} == {"vocab"} and hints(report) == {"remove vocab from cuts"}


class FailingLoss(VocabularyLoss):
    """One part fails while the others wait for it."""

    def forward(self, x: Tensor, labels: Tensor | None, index: Any = None, parts: Any = None) -> Tensor:
        if index is not None and index[0] > 0:
            raise ArithmeticError("on one part")
        return super().forward(x, labels, index, parts)


def test_a_part_that_fails_does_not_hang_the_others() -> None:
    begin = time.monotonic()
    report = check_regions(FailingLoss(CONFIG), ks=(2,))
    assert time.monotonic() - begin < SECONDS / 2
    assert [(v.tensor, v.detail) for v in report.violations] == [("code", "ArithmeticError: on one part")]


class Inner(nn.Module):
    region = Region({"x": "batch wide -> batch all"}, "batch all -> batch wide", cuts="batch")

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Outer(nn.Module):
    """Two calls of one inner region, which needs whole what the body cuts."""

    region = Region(
        {"x": "batch embed"},
        "batch embed +wide",
        {"up.weight": "wide embed", "down.weight": "embed wide"},
        "batch wide",
    )

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 12, False), Inner(), nn.Linear(12, 8, False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(self.inner(up) * self.inner(2 * up.roll(self.roll, 0)))

    roll = 0


class Rolling(Outer):
    roll = 1


def test_inner_regions_are_functions_of_their_own() -> None:
    report = check_regions(Outer())
    assert report.ok, str(report)
    assert report.hints == []  # `all` is not lawful
    report = check_regions(Rolling(), ks=(2,))
    assert ("", "batch", "inner inner (call 2).x") in found(report)
    assert {v.cut for v in report.violations} == {"batch"}


def test_outer_side_of_an_inner_region_that_does_not_say_what_is_cut() -> None:
    model = Outer()
    silent = Region({"x": "batch _ -> batch all"}, "batch all -> batch wide", cuts="batch")
    model.inner = with_region(Inner, silent)()
    report = check_regions(model)
    assert ("", "wide", "inner inner.x") in found(report)
    assert {v.cut for v in report.violations} == {"wide"}


def test_inner_region_that_is_wrong_itself() -> None:
    model = Outer()
    model.inner = edited(Inner, cuts="batch all")()
    report = check_regions(model)
    assert {(v.region, v.cut) for v in report.violations} == {("inner", "all")}
    assert hints(report) == {"remove all from cuts"}


class Through(nn.Module):
    """Hands a tensor to an inner region before heads are cut."""

    region = Region({"x": "batch embed"}, "batch heads", {"scale": "_", "up.weight": "heads embed"}, "batch heads")

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.up, self.scale = inner, nn.Linear(8, 12, bias=False), nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.inner(x * self.scale))


def test_gradients_that_inner_regions_hand_back() -> None:
    lawful, counted = (
        with_region(Inner, Region({"x": f"{outer} -> batch embed"}, "batch embed", cuts="batch"))
        for outer in ("batch embed", "batch embed =")
    )
    assert check_regions(Through(lawful())).ok
    report = check_regions(Through(counted()))
    assert found(report) == {("", "heads", "grad x"), ("", "heads", "grad scale")}
    assert hints(report) == {"take = off inner inner.x"}


def test_timid_signature_is_a_hint() -> None:
    report = check_regions(edited(MLP, cuts="batch")(CONFIG))
    assert report.ok and report.hints == [("", "ffn"), ("", "seq")]
    assert "hint: the model: ffn is lawful too: add it to cuts" in str(report)


# ---- what cannot be checked --------------------------------------------------------------------------------


def test_cut_of_a_name_that_nothing_has() -> None:
    (violation,) = check_regions(edited(MLP, cuts="fnn")(CONFIG)).violations
    assert violation.hint == "remove fnn from cuts: nothing here can be cut by fnn"
    (violation,) = check_regions(edited(Attention, cuts="head_dim")(CONFIG)).violations
    assert violation.hint == "remove head_dim from cuts: nothing here can be cut by head_dim"


def test_two_dims_of_one_tensor() -> None:
    report = check_regions(edited(MLP, cuts="batch+seq")(CONFIG), ks=(2,))
    (violation,) = report.violations
    assert violation.detail == "ValueError: 'batch seq embed' of x can be cut by the first name of one dim only"


class Noisy(nn.Module):
    region = Region({"x": "batch seq embed"}, "batch seq embed", cuts="batch")

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x)


def test_randomness_is_named() -> None:
    report = check_regions(Noisy(), sizes={"embed": 8})
    assert any(v.cut == "nothing" and "is it random?" in v.hint for v in report.violations)


def test_signatures_that_contradict_the_code_are_refused() -> None:
    with pytest.raises(ModelError, match="the model itself must be a region"):
        check_regions(nn.Linear(2, 2))
    unnamed = with_region(nn.Linear, Region({"input": "batch embed"}, "batch ffn", {"weight": "ffn embed"}, "batch"))
    with pytest.raises(ModelError, match="bias: no region names its dims"):
        check_regions(unnamed(4, 6))
    short = with_region(nn.Linear, Region({"input": "batch embed"}, "ffn", {"weight": "ffn embed", "bias": "ffn"}))
    with pytest.raises(ModelError, match=r"output 0: signature 'ffn' has 1 dims, the tensor \[6, 6\]"):
        check_regions(short(4, 6))
    with pytest.raises(ModelError, match=r"input q: give its size: sizes=\{'heads': ...\}, or a batch"):
        check_regions(abstract(GroupedCore))
