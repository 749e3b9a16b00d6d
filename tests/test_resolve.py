"""From a model, a plan and a mesh to a Program: every fault by its whole message, and what a Program says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm import Mesh, ModelError, Plan, PlanError, Program, Region, UserError
from dtensor_lm.edges import Collective
from dtensor_lm.models.llama import Llama
from dtensor_lm.sharding_plans import ddp, fsdp, hsdp, standard, tp, tp_sp, zero1, zero2, zero3

pytestmark = pytest.mark.quick


def tiny(**changes: Any) -> nn.Module:
    return dl.models.build("tiny", **{"layers": 2, **changes})


def fails(mesh: Mesh, *faults: str) -> AbstractContextManager[None]:
    """The whole text of the PlanError."""
    return says(PlanError, f"the plan does not fit this model on mesh {mesh}:", *faults)


def contradicts(*faults: str) -> AbstractContextManager[None]:
    return says(ModelError, "the model contradicts its signatures:", *faults)


@contextmanager
def says(kind: type[UserError], title: str, *faults: str) -> Iterator[None]:
    with pytest.raises(kind) as error:
        yield
    assert str(error.value) == "\n".join([title, *(f"  - {fault}" for fault in faults)])


# Names and axes

DIMS = "batch, core_heads, core_kv_heads, embed, ffn, head_dim, heads, kv_heads, kv_seq, q_seq, res, seq, vocab"


def test_an_axis_that_shards_nothing() -> None:
    mesh = Mesh(tp=2, replicas=2)
    with fails(
        mesh,
        "axis replicas=2 shards nothing: give it a name in the plan, or take it off the mesh "
        "(the plan uses "
        "dp, fsdp, pp, tp)",
    ):
        dl.resolve(tiny(), standard(), mesh)
    mesh = Mesh(dpp=2)
    with fails(
        mesh,
        "axis dpp=2 shards nothing (did you mean pp or dp or fsdp?): give it a name in the plan, or "
        "take it off "
        "the mesh (the plan uses dp, fsdp, pp, tp)",
    ):
        dl.resolve(tiny(), standard(), mesh)
    mesh = Mesh(tp=2)
    with fails(
        mesh,
        "axis tp=2 shards nothing: give it a name in the plan, or take it off the mesh (the plan uses no axis)",
    ):
        dl.resolve(tiny(), Plan(), mesh)


def test_a_name_that_no_parameter_has_stores_nothing() -> None:
    mesh = Mesh(dp=2)
    with fails(
        mesh,
        "storage/optimizer: no parameter has the dimension 'batch'; parameters have embed, ffn, head_dim, "
        "heads, "
        "kv_heads, vocab",
        "axis dp=2 shards nothing: give it a name in the plan, or take it off the mesh (the plan uses dp)",
    ):
        dl.resolve(tiny(), Plan(storage={"batch": "dp"}, optimizer={"batch": "dp"}), mesh)


@pytest.mark.case("UX-01")
def test_misspelt_names_with_the_nearest() -> None:
    mesh = Mesh(dp=2, tp=2)
    compute = {"batch": "dp", "haeds": "tp", "ffn": "tp"}
    plan = Plan(compute, storage={"layer": "dp"}, optimizer={"haeds": "tp"})
    with fails(
        mesh,
        "compute/optimizer: the model has no dimension called 'haeds' (did you mean heads or kv_heads or "
        "res?); it has "
        f"{DIMS}",
        f"storage: the model has no dimension called 'layer'; it has {DIMS}",
    ):
        dl.resolve(tiny(), plan, mesh)


def test_an_optional_name_may_be_missing() -> None:
    dl.resolve(tiny(), ddp() | Plan(compute={"expert": "dp"}, optional=frozenset({"expert"})), Mesh(dp=2))
    with pytest.raises(PlanError, match="no dimension called 'expert'"):
        dl.resolve(tiny(), ddp() | Plan(compute={"expert": "dp"}), Mesh(dp=2))


# Sizes that do not divide

WHOLE_KV = "or leave it whole: kv_heads and core_kv_heads -> ()"
SIX = (
    "layers.*.attention: heads and core_heads: 6 does not divide over tp=4 (kv_heads: 6): use heads of 4 or "
    "8, or tp of "
    "1 or 2",
    "layers.*.attention: kv_heads and core_kv_heads: 6 does not divide over tp=4 (heads: 6): use kv_heads of "
    "4 or 8, or "
    f"tp of 1 or 2, {WHOLE_KV}",
)
THREE = (
    "layers.*.attention: heads and core_heads: 3 does not divide over tp=2 (kv_heads: 3): use heads of 2 or "
    "4, or tp of 1",
    "layers.*.attention: kv_heads and core_kv_heads: 3 does not divide over tp=2 (heads: 3): use kv_heads of "
    "2 or 4, or "
    f"tp of 1, {WHOLE_KV}",
)
FFN = (
    "layers.*.mlp: ffn: 30 does not divide over tp=4: use ffn of 28 or 32, or tp of 1 or 2, or leave it "
    "whole: ffn -> ()"
)
BATCH = "batch: 6 sequences do not divide over dp=4: use a batch of 4 or 8"


@pytest.mark.case("UX-04")
@pytest.mark.parametrize(
    ("changes", "sizes", "more", "faults"),
    [
        (dict(heads=6, kv_heads=6, head_dim=16), dict(tp=4), {}, SIX),
        (dict(heads=3, kv_heads=3, head_dim=16), dict(tp=2), {}, THREE),
        (dict(ffn=30), dict(tp=4), {}, [FFN]),
        ({}, dict(dp=4), dict(batch=6), [BATCH]),
        (dict(ffn=30), dict(dp=4, tp=4), dict(batch=6), [BATCH, FFN]),
        (
            {}, dict(dp=4), dict(batch=6, micro_batches=3),
            ["batch: 6 sequences in 3 micro-batches do not divide over dp=4: use a batch of 12"],
        ),
        ({}, dict(dp=2, fsdp=3), dict(batch=8),
         ["batch: 8 sequences do not divide over (dp, fsdp) of 6 in all: use a batch of 6 or 12"]),
        (
            dict(vocab=30), dict(tp=4), {},
            ["embed: vocab: 30 does not divide over tp=4: use vocab of 28 or 32, or tp of 1 or 2, or leave "
             "it whole: "
             "vocab -> ()"],
        ),
        (
            dict(vocab=33), dict(tp=4), {},
            ["embed: vocab: 33 does not divide over tp=4: use vocab of 32 or 36, or tp of 1, or leave it "
             "whole: "
             "vocab -> ()"],
        ),
        (
            dict(vocab=3), dict(tp=4), {},
            ["embed: vocab: 3 does not divide over tp=4: use vocab of 4, or tp of 1, or leave it whole: "
             "vocab -> ()"],
        ),
        ({}, dict(tp=4), dict(seq=30),
         ["res: a sequence of 30 does not divide over tp=4: use a length of 28 or 32"]),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide(
    changes: dict[str, int], sizes: dict[str, int], more: dict[str, int], faults: list[str]
) -> None:
    mesh = Mesh(**sizes)
    with fails(mesh, *faults):
        dl.resolve(tiny(**changes), standard(), mesh, **more)


@pytest.mark.case("UX-04")
def test_everything_at_once() -> None:
    mesh = Mesh(dp=4, tp=4, idle=2)
    plan = replace(standard(), storage={"embed": "fsdp", "ebmed": "dp"})
    with fails(
        mesh,
        f"storage: the model has no dimension called 'ebmed' (did you mean embed?); it has {DIMS}",
        "axis idle=2 shards nothing: give it a name in the plan, or take it off the mesh "
        "(the plan uses dp, fsdp, pp, tp)",
        "batch: 6 sequences do not divide over dp=4: use a batch of 4 or 8",
        "res: a sequence of 30 does not divide over tp=4: use a length of 28 or 32",
        "embed: vocab: 33 does not divide over tp=4: use vocab of 32 or 36, or tp of 1 or 3, or leave it "
        "whole: vocab -> "
        "()",
        "layers.*.attention: heads and core_heads: 6 does not divide over tp=4 (kv_heads: 3): use heads of 4 "
        "or 8, or tp "
        "of 1 or 3",
        "layers.*.attention: kv_heads and core_kv_heads: 3 does not divide over tp=4 (heads: 6): use "
        "kv_heads of 4, or "
        f"tp of 1 or 3, {WHOLE_KV}",
        "layers.*.mlp: ffn: 30 does not divide over tp=4: use ffn of 28 or 32, or tp of 1 or 3, or leave it "
        "whole: ffn "
        "-> ()",
    ):
        dl.resolve(tiny(heads=6, kv_heads=3, head_dim=16, ffn=30, vocab=33), plan, mesh, batch=6, seq=30)


@pytest.mark.case("TP-05")
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_fewer_kv_heads_than_tensor_parallel_ranks(kv_heads: int) -> None:
    mesh, works = Mesh(tp=4), {1: "1", 2: "1 or 2"}[kv_heads]
    with fails(
        mesh,
        f"layers.*.attention: kv_heads and core_kv_heads: {kv_heads} does not divide over tp=4 (heads: 4): "
        "use kv_heads "
        f"of 4, or tp of {works}, {WHOLE_KV}",
    ):
        dl.resolve(tiny(heads=4, kv_heads=kv_heads), standard(), mesh)
    # The repair that the message names.
    plan = standard()
    repaired = replace(plan, compute={**plan.compute, "kv_heads": (), "core_kv_heads": ()})
    program = dl.resolve(tiny(heads=4, kv_heads=kv_heads), repaired, mesh)
    width = kv_heads * 32
    found = {n: str(program.parameters[f"layers.0.attention.{n}.weight"].storage) for n in ("wq", "wk")}
    assert found == {
        "wq": "f32[(heads head_dim)@tp=128/4, embed=128]",
        "wk": f"f32[(kv_heads head_dim)={width}, embed=128] R:tp",
    }
    # And two axes: heads over both, kv heads over one.
    if kv_heads == 2:
        both = ("tp_kv", "tp_rep")
        one = "tp_kv"
        plan = Plan({"heads": both, "core_heads": both, "kv_heads": one, "core_kv_heads": one})
        dl.resolve(tiny(heads=4, kv_heads=2), plan, Mesh(tp_kv=2, tp_rep=2))


def test_the_other_repairs_resolve() -> None:
    plan = standard()
    for name, changes in (("ffn", dict(ffn=30)), ("vocab", dict(vocab=33))):
        dl.resolve(tiny(**changes), replace(plan, compute={**plan.compute, name: ()}), Mesh(tp=4))


# Cuts that regions do not allow


def test_two_cuts_of_one_region() -> None:
    mesh = Mesh(dp=2)
    with fails(
        mesh,
        "layers.*.mlp: axis dp would cut batch and ffn of one region, and an axis serves one "
        "cut: take it off "
        "all but one (MLP may be cut by batch, ffn, seq)",
    ):
        dl.resolve(tiny(), Plan(compute={"batch": "dp", "ffn": "dp"}), mesh)
    with fails(
        mesh,
        "embed, layers.*, layers.*.attention and 3 more: axis dp would cut batch and embed of "
        "one region, and "
        "an axis serves one cut: take it off all but one",
    ):
        dl.resolve(tiny(), Plan(compute={"batch": "dp", "embed": "dp"}), mesh)


def test_two_dims_of_one_tensor() -> None:
    mesh = Mesh(tp=2)
    with fails(
        mesh,
        "layers.*.mlp.gate.weight, layers.*.mlp.up.weight: storage: axis tp would cut two dims of one "
        "tensor, ffn and "
        "embed: take it off one of them",
        "layers.*.mlp.down.weight: storage: axis tp would cut two dims of one tensor, embed and ffn: take it "
        "off one of "
        "them",
    ):
        dl.resolve(tiny(), Plan(compute={"ffn": "tp"}, storage={"embed": "tp"}), mesh)


def test_a_name_that_is_needed_whole() -> None:
    mesh = Mesh(cp=2)
    core = "AttentionCore may be cut by batch, core_heads, core_heads+core_kv_heads"
    with fails(
        mesh,
        f"layers.*.attention.core: needs q_seq whole, but the plan cuts it by axis cp: q_seq -> () ({core})",
    ):
        dl.resolve(tiny(), Plan(compute={"seq": "cp", "res": "cp", "q_seq": "cp"}), mesh)
    with fails(
        mesh,
        "layers.*.attention.core: needs core_kv_heads whole, but the plan cuts it by axis cp: "
        "core_kv_heads "
        f"-> (), or cut core_heads+core_kv_heads together ({core})",
    ):
        dl.resolve(tiny(), Plan(compute={"core_kv_heads": "cp"}), mesh)
    with fails(
        mesh,
        "embed, layers.*, layers.*.attention and 3 more: needs embed whole, but the plan cuts "
        "it by axis "
        "cp: embed -> ()",
    ):
        dl.resolve(tiny(), Plan(compute={"embed": "cp"}), mesh)


def test_the_inside_of_a_fused_dim() -> None:
    mesh = Mesh(tp=2)
    with fails(
        mesh,
        "layers.*.attention.wq.weight, layers.*.attention.wk.weight, layers.*.attention.wv.weight and 1 "
        "more: compute: "
        "head_dim -> (tp) would cut inside the fused dims that it stands in: head_dim -> ()",
    ):
        dl.resolve(tiny(), Plan(compute={"heads": "tp", "head_dim": "tp"}), mesh)


def test_axes_of_a_bundle_stand_in_one_order() -> None:
    mesh = Mesh(a=2, b=2)
    with fails(
        mesh,
        "layers.*.attention: heads -> (a, b); kv_heads -> (b, a): axes that cut them together come first and "
        "in the same "
        "order: write heads -> (a, b); kv_heads -> (a, b)",
    ):
        dl.resolve(tiny(), Plan(compute={"heads": ("a", "b"), "kv_heads": ("b", "a")}), mesh)
    with fails(
        mesh,
        "layers.*.attention: heads -> (a, b); kv_heads -> (b): axes that cut them together come first and in "
        "the same "
        "order: write heads -> (b, a); kv_heads -> (b)",
    ):
        dl.resolve(tiny(), Plan(compute={"heads": ("a", "b"), "kv_heads": "b"}), mesh)
    dl.resolve(tiny(), Plan(compute={"heads": ("b", "a"), "kv_heads": "b"}), mesh)


def test_the_prefix_rule_and_its_repair() -> None:
    mesh = Mesh(dp=2, fsdp=2, tp=2)
    plan = Plan(
        compute={"batch": ("dp", "fsdp"), "ffn": "tp"},
        storage={"embed": "fsdp", "ffn": ("fsdp", "tp")},
        optimizer={"embed": ("dp", "fsdp"), "ffn": ("tp", "fsdp")},
    )
    with fails(
        mesh,
        "optimizer: embed -> (dp, fsdp) must begin with its axes in storage, (fsdp): write (fsdp, dp)",
        "storage: ffn -> (fsdp, tp) must begin with its axes in compute, (tp): write (tp, fsdp)",
        "gradients: ffn -> (fsdp, tp) must begin with its axes in compute, (tp): write (tp, fsdp)",
        "optimizer: ffn -> (tp, fsdp) must begin with its axes in storage, (fsdp, tp): write (fsdp, tp)",
        "layers.*.mlp.gate.weight, layers.*.mlp.up.weight: storage: axis fsdp would cut two dims of one "
        "tensor, ffn and "
        "embed: take it off one of them",
        "layers.*.mlp.down.weight: storage: axis fsdp would cut two dims of one tensor, embed and ffn: take "
        "it off one "
        "of them",
    ):
        dl.resolve(tiny(), plan, mesh)
    with fails(
        mesh,
        "axis tp=2 shards nothing: give it a name in the plan, or take it off the mesh (the plan uses dp, fsdp)",
        "embed -> (fsdp) in storage and (dp) in gradients: one must begin with the other, since optimizer "
        "begins with "
        "both",
    ):
        dl.resolve(tiny(), Plan(storage={"embed": "fsdp"}, gradients={"embed": "dp"}), mesh)
    # The order that the message names works.
    dl.resolve(tiny(), replace(hsdp(), optimizer={"embed": ("fsdp", "dp")}), Mesh(dp=2, fsdp=2))


def test_batches_that_micro_batches_do_not_divide_are_shown_with_the_rest() -> None:
    with pytest.raises(PlanError) as error:
        dl.resolve(tiny(heads=6, kv_heads=6, head_dim=16), standard(), Mesh(tp=4), batch=3, micro_batches=2)
    assert "batch: 3 sequences in 2 micro-batches do not divide: use a batch of 2 or 4" in error.value.faults
    assert any("heads" in fault for fault in error.value.faults)


def test_arguments_that_cannot_be_used_are_all_named() -> None:
    with says(
        ModelError,
        "resolve cannot use these arguments:",
        "batch is 0: a whole number of at least 1",
        "seq is -1: a whole number of at least 1",
        "micro_batches is 0: a whole number of at least 1",
        "dtype is 'flot32' (did you mean float32 or float64 or bfloat16?): use float32, bfloat16, float64",
        "decay is 'some': use matrices or all",
    ):
        dl.resolve(tiny(), ddp(), Mesh(), batch=0, seq=-1, micro_batches=0, dtype="flot32", decay="some")


# Models that cannot be used


class Body(nn.Module):
    region: Region

    def __init__(self, head_dim: int | None) -> None:
        super().__init__()
        if head_dim is not None:
            self.head_dim = head_dim
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def small(
    body: dict[str, str],
    head_dim: int | None = None,
    x: str = "batch seq embed",
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> nn.Module:
    """A table and a body; `body` names the parameters of the body."""

    class Inner(Body):
        region = Region(inputs={"x": x}, outputs="batch seq embed +ffn", params=body, cuts="batch seq ffn")

    class Small(nn.Module):
        region = Region({"ids": "int batch seq"}, "+batch +seq =", {"table": "vocab embed"}, "batch seq")

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(32, 8))
            self.body = Inner(head_dim)

        def forward(self, ids: Tensor) -> Tensor:
            return forward(self, ids) if forward else self.body(F.embedding(ids, self.table)).sum()

    return dl.abstract(Small)


RIGHT = {"up.weight": "ffn embed", "down.weight": "embed ffn"}
HEADS = {"up.weight": "(heads head_dim) embed", "down.weight": "embed ffn"}


def resolve_small(*args: Any, **kwargs: Any) -> Program:
    return dl.resolve(small(*args, **kwargs), ddp(), Mesh(dp=2), seq=4)


def test_a_small_model_resolves() -> None:
    assert str(resolve_small(RIGHT).parameters["body.up.weight"].storage) == "f32[ffn=16, embed=8] R:dp"
    assert resolve_small(HEADS, head_dim=4).parameters["body.up.weight"].spec == "(heads head_dim) embed"


def test_a_parameter_that_no_region_claims() -> None:
    with contradicts(
        "body.down.weight: no region names its dims; add 'down.weight' to params of the region of Inner (body)"
    ):
        resolve_small({"up.weight": "ffn embed"})


def test_a_signature_that_contradicts_parameters() -> None:
    with contradicts(
        "body.up.weight: signature 'ffn' has 1 dims, the tensor [16, 8]",
        "body.dwn.weight: the region names a parameter that does not exist (did you mean down.weight or up.weight?)",
        "body.down.weight: no region names its dims; add 'down.weight' to params of the region of Inner (body)",
    ):
        resolve_small({"up.weight": "ffn", "dwn.weight": "embed ffn"})
    with contradicts(
        "body.down.weight: ffn has size 8 here and 16 elsewhere in the region",
        "body.down.weight: embed has size 16 here and 8 elsewhere in the region",
    ):
        resolve_small({**RIGHT, "down.weight": "ffn embed"})


def test_fused_dims_need_the_sizes_of_their_factors() -> None:
    with contradicts(
        "body.up.weight: the fused dim (heads head_dim) needs attributes for all but one of heads, head_dim: "
        "set self.head_dim"
    ):
        resolve_small(HEADS)
    with contradicts("body.up.weight: the fused dim (heads head_dim) of 16 is no multiple of 5"):
        resolve_small(HEADS, head_dim=5)


def test_a_signature_that_contradicts_inputs() -> None:
    with pytest.raises(ModelError) as error:
        resolve_small(RIGHT, x="batch embed")
    assert error.value.faults == ("body: x: signature 'batch embed' has 2 dims, the tensor [2, 4, 8]",)
    with pytest.raises(ModelError) as error:
        resolve_small(RIGHT, x="int batch seq embed")
    assert error.value.faults == ("body: x is float32 but its signature says 'int batch seq embed'",)


def test_a_region_that_is_called_with_two_shapes() -> None:
    def forward(self: nn.Module, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        return self.body(x).sum() + self.body(x[:, :2]).sum()

    with contradicts(
        "body: x: seq has size 2 here and 4 elsewhere in the region",
        "body: output 0: seq has size 2 here and 4 elsewhere in the region",
    ):
        resolve_small(RIGHT, forward=forward)


def test_a_model_with_memory() -> None:
    with says(
        ModelError,
        "resolve cannot use these arguments:",
        "the model is not on the meta device: build it inside dtensor_lm.abstract(lambda: ...)",
    ):
        dl.resolve(Llama(dl.models.config("tiny", layers=1, embed=16, ffn=16, vocab=16)), ddp(), Mesh(dp=2))


def test_a_model_without_signature() -> None:
    with says(ModelError, "the model itself must be a region: give its class a `region` with inputs and outputs"):
        dl.resolve(dl.abstract(lambda: nn.Linear(2, 2)), ddp(), Mesh(dp=2), seq=4)
    with says(
        ModelError,
        "resolve cannot use these arguments:",
        "seq is missing: pass seq=..., since the model has no config.seq",
    ):
        dl.resolve(small(RIGHT), ddp(), Mesh(dp=2))


def test_unreadable_signatures() -> None:
    with says(
        ModelError,
        "a region's signature cannot be read:",
        "input x: 'a (b': cannot read '(b'",
        "input y: 'a a': a name stands twice in one tensor",
        "input z: 'a -> b -> c' has more than one '->'",
        "input i: 'index a b': 'index' takes one name",
        "output 0: '( )': a fused dim without names",
        "output 1: 'a +a': a name is both a dim and summed over",
        "output 2: '+a +a': a name is summed over twice",
        "parameter w: 'A': cannot read 'A'",
    ):
        Region(
            inputs={"x": "a (b", "y": "a a", "z": "a -> b -> c", "i": "index a b"},
            outputs=("( )", "a +a", "+a +a"),
            params={"w": "A"},
        )


# What a Program says


def layouts(program: Program, table: str, *names: str) -> list[str]:
    return [str(getattr(program.parameters[name], table)) for name in names]


GATE, DOWN = "layers.1.mlp.gate.weight", "layers.1.mlp.down.weight"
NORM, TABLE = "layers.1.mlp_norm.weight", "embed.weight"


@pytest.mark.parametrize(
    ("plan", "sizes", "want"),
    [
        (ddp(), dict(dp=2), {
            "gathered": ["f32[ffn=384, embed=128] R:dp", "f32[embed=128] R:dp"],
            "storage": ["f32[ffn=384, embed=128] R:dp", "f32[embed=128] R:dp"],
            "gradients": ["f32[ffn=384, embed=128] R:dp", "f32[embed=128] R:dp"],
            "optimizer": ["f32[ffn=384, embed=128] R:dp", "f32[embed=128] R:dp"]}),
        (zero1(), dict(dp=2), {
            "gradients": ["f32[ffn=384, embed=128] R:dp", "f32[embed=128] R:dp"],
            "optimizer": ["f32[ffn=384, embed@dp=128/2]", "f32[embed@dp=128/2]"]}),
        (zero2(), dict(dp=2), {
            "storage": ["f32[ffn=384, embed=128] R:dp", "f32[embed=128] R:dp"],
            "gradients": ["f32[ffn=384, embed@dp=128/2]", "f32[embed@dp=128/2]"]}),
        (zero3(), dict(dp=2), {
            "gathered": ["f32[ffn=384, embed=128] R:dp", "f32[embed=128] R:dp"],
            "storage": ["f32[ffn=384, embed@dp=128/2]", "f32[embed@dp=128/2]"],
            "optimizer": ["f32[ffn=384, embed@dp=128/2]", "f32[embed@dp=128/2]"]}),
        (hsdp(), dict(dp=2, fsdp=2), {
            "gathered": ["f32[ffn=384, embed=128] R:dp.fsdp", "f32[embed=128] R:dp.fsdp"],
            "storage": ["f32[ffn=384, embed@fsdp=128/2] R:dp", "f32[embed@fsdp=128/2] R:dp"]}),
        (tp(), dict(tp=2), {"storage": ["f32[ffn@tp=384/2, embed=128]", "f32[embed=128] I:tp"]}),
        (tp_sp(), dict(tp=2), {"storage": ["f32[ffn@tp=384/2, embed=128]", "f32[embed=128] R:tp"]}),
        (standard(zero=1), dict(dp=2, fsdp=2, tp=2), {
            "gathered": ["f32[ffn@tp=384/2, embed=128] R:dp.fsdp", "f32[embed=128] R:dp.fsdp.tp"],
            "storage": ["f32[ffn@tp=384/2, embed@fsdp=128/2] R:dp", "f32[embed@fsdp=128/2] R:dp.tp"],
            "optimizer": ["f32[ffn@tp=384/2, embed@fsdp.dp=128/4]", "f32[embed@fsdp.dp=128/4] R:tp"]}),
    ],
    ids=["ddp", "zero1", "zero2", "zero3", "hsdp", "tp", "tp_sp", "all"],
)  # fmt: skip
def test_states_of_parameters(plan: Plan, sizes: dict[str, int], want: dict[str, list[str]]) -> None:
    program = dl.resolve(tiny(), plan, Mesh(**sizes))
    assert {table: layouts(program, table, GATE, NORM) for table in want} == want


def test_narrow_parameters_have_wide_gradients_and_masters() -> None:
    program = dl.resolve(tiny(), zero1(), Mesh(dp=2), dtype="bfloat16")
    assert layouts(program, "storage", DOWN) == ["bf16[embed=128, ffn=384] R:dp"]
    assert layouts(program, "gradients", DOWN) == ["f32[embed=128, ffn=384] R:dp"]
    assert layouts(program, "optimizer", DOWN) == ["f32[embed@dp=128/2, ffn=384]"]
    n = 459_392
    assert program.bytes_per_rank() == {"parameters": 2 * n, "gradients": 4 * n, "optimizer": 6 * n}


def test_axes_of_size_one_cause_nothing() -> None:
    ones = Mesh(dp=1, fsdp=1, tp=1)
    assert dl.resolve(tiny(), standard(zero=3), ones).collectives == ()
    small, large = (dl.resolve(tiny(), standard(zero=3), m) for m in (Mesh(tp=2), Mesh(dp=1, fsdp=1, tp=2)))
    assert small.collectives == large.collectives
    assert all(c.axes == ("tp",) for c in large.collectives)


def counted(collectives: tuple[Collective, ...], region: str, phase: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for c in collectives:
        if c.where.startswith(region + ":") and c.phase == phase:
            total[c.op] += c.count
    return total


def test_sequence_parallel_regions_gather_once_and_scatter_once() -> None:
    program = dl.resolve(tiny(), tp_sp(), Mesh(tp=2))
    for region in ("layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp"):
        for phase in ("forward", "backward"):
            found = counted(program.collectives, region, phase)
            assert found == {"all_gather": 1, "reduce_scatter": 1}, (region, phase)
        assert not counted(program.collectives, f"{region}.core", "forward")
    edges = {(e.region, e.tensor): e for e in program.edges if e.region == "layers.0.mlp"}
    x, out = edges["layers.0.mlp", "x"], edges["layers.0.mlp", "output 0"]
    assert (str(x.source), str(x.target)) == (
        "f32[batch=1, res@tp=256/2, embed=128]",
        "f32[batch=1, seq=256, embed=128] R:tp",
    )
    assert (str(out.source), str(out.target)) == (
        "f32[batch=1, seq=256, embed=128] P:tp",
        "f32[batch=1, res@tp=256/2, embed=128]",
    )


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("plan", "sizes", "want"),
    [
        (ddp(), dict(dp=2), [("all_reduce", ("dp",))]),
        (zero1(), dict(dp=2), [("reduce_scatter", ("dp",))]),
        (ddp() | tp_sp(), dict(dp=2, tp=2), [("all_reduce", ("dp",)), ("all_reduce", ("dp", "tp"))]),
        (standard(), dict(dp=2, fsdp=2), [("all_reduce", ("dp",))]),
    ],
    ids=["ddp", "zero1", "ddp+sp", "hsdp"],
)
def test_gradients_are_reduced_once_a_step(
    plan: Plan, sizes: dict[str, int], want: list[tuple[str, tuple[str, ...]]], micro_batches: int
) -> None:
    program = dl.resolve(tiny(), plan, Mesh(**sizes), micro_batches=micro_batches)
    step = [c for c in program.collectives if c.phase == "step" and c.where == "gradients"]
    found = [(c.op, c.axes, c.count) for c in step]
    assert sorted(found) == sorted((op, axes, 1) for op, axes in want)
    if "fsdp" not in sizes:
        assert not [c for c in program.collectives if c.where.endswith(": gradients")]


def test_whole_gathers_are_one_per_unit() -> None:
    program = dl.resolve(tiny(), fsdp(), Mesh(fsdp=2), micro_batches=3)
    gathers = [(c.where, c.count, c.phase) for c in program.collectives if c.op == "all_gather"]
    assert gathers == [
        ("embed: parameters", 3, "forward"),  # a look-up does not need its table again in backward
        ("layers.0: parameters", 3, "forward"),
        ("layers.0: parameters again", 3, "backward"),
        ("layers.1: parameters", 3, "forward"),
        ("layers.1: parameters again", 3, "backward"),
        ("head: parameters", 3, "forward"),
        ("head: parameters again", 3, "backward"),
    ]
    once = dl.resolve(tiny(), replace(fsdp(), regather=False), Mesh(fsdp=2))
    assert not [c for c in once.collectives if c.where.endswith("again")]


def test_a_tied_table_has_one_home() -> None:
    program = dl.resolve(tiny(tied=True), standard(), Mesh(dp=2, tp=2))
    assert "head.loss.weight" not in program.parameters
    assert layouts(program, "storage", TABLE) == ["f32[vocab@tp=256/2, embed=128] R:dp"]
    uses = [(e.region, e.tensor) for e in program.edges if e.parameter == TABLE]
    assert uses == [("embed", "weight"), ("head.loss", "weight")]


MODELS = {
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama2-7b": 6_738_415_616,
}


@pytest.mark.parametrize("name", MODELS)
def test_published_parameter_counts(name: str) -> None:
    assert sum(p.numel() for p in dl.models.build(name).parameters()) == MODELS[name]


def test_the_largest_model_on_a_thousand_ranks() -> None:
    mesh = Mesh(fsdp=128, tp=8)
    program = dl.resolve(dl.models.build("llama3-405b"), standard(), mesh, dtype="bfloat16")
    data = program.as_dict()
    assert data["parameter_count"] == MODELS["llama3-405b"]
    down = layouts(program, "storage", "layers.125.mlp.down.weight")
    assert down == ["bf16[embed@fsdp=16384/128, ffn@tp=53248/8]"]
    assert program.batch == 128
    assert "layers.*.attention.wq.weight x126" in str(program)


def test_programs_survive_json_and_print_the_same() -> None:
    def make() -> Program:
        return dl.resolve(tiny(), standard(zero=1), Mesh(dp=2, fsdp=2, tp=2), micro_batches=2, seq=64)

    program, again = make(), make()
    data = program.as_dict()
    assert json.loads(json.dumps(data)) == data == again.as_dict()
    assert Plan.from_dict(data["plan"]) == program.plan
    assert str(program) == str(again)


def test_how_a_program_is_printed() -> None:
    text = str(dl.resolve(tiny(), tp_sp(), Mesh(tp=2), seq=64))
    head, *_ = text.split("\n\n")
    assert head == (
        "Llama, 459,392 parameters, on mesh tp=2 (2 ranks), float32\n"
        "batch 1 x 64 tokens in 1 micro-batch\n"
        "state per rank: parameters 898.5 KiB, gradients 898.5 KiB, optimizer 1.8 MiB "
        "(without activations and gathered weights)"
    )
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert {
        "layers.*.mlp.gate.weight x2 f32[ffn@tp=384/2, embed=128] 192x128 96.0 KiB decays",
        "layers.*.mlp_norm.weight x2 f32[embed=128] R:tp 128 512 B",
        "layers.*.mlp x2 x f32[batch=1, res@tp=64/2, embed=128] -> f32[batch=1, seq=64, embed=128] R:tp "
        "S>R@tp all_gather / reduce_scatter",
        "forward all_gather @tp 2 x 32.0 KiB layers.*.mlp: x (float32)",
        "step all_reduce @tp 1 x 2.5 KiB gradients (float32)",
    } <= lines
    alone = str(dl.resolve(tiny(), standard(), Mesh()))
    assert "on one process, float32" in alone
    assert alone.count("  none") == 2


class Scale(nn.Module):
    region = Region({"x": "batch res embed"}, "batch res embed", {"scale": "embed"}, "batch res")

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Wide(Scale):
    region = Region(
        {"x": "batch res embed -> batch seq embed"},
        "batch seq embed +ffn -> batch res embed",
        {"scale": "embed", "up.weight": "ffn embed", "down.weight": "embed ffn"},
        "batch seq ffn",
    )

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__(scale)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * self.scale))


class TwoUses(nn.Module):
    region = Region({"ids": "int batch seq"}, "+batch +seq =", {"table": "vocab embed"}, "batch seq res seq+res")

    def __init__(self) -> None:
        super().__init__()
        self.table, shared = nn.Parameter(torch.zeros(32, 8)), nn.Parameter(torch.zeros(8))
        self.narrow, self.wide = Scale(shared), Wide(shared)

    def forward(self, ids: Tensor) -> Tensor:
        return self.wide(self.narrow(F.embedding(ids, self.table))).sum()


def test_a_parameter_of_two_regions_is_reduced_once() -> None:
    """Its home is R on the axis that only its second use knows; the first use gives one addend on the first rank."""
    program = dl.resolve(dl.abstract(TwoUses), Plan({"ffn": "tp"}), Mesh(tp=2), batch=2, seq=4)
    assert layouts(program, "storage", "narrow.scale") == ["f32[embed=8] R:tp"]
    uses = {e.region: [str(step) for step in e.steps] for e in program.edges if e.parameter == "narrow.scale"}
    assert uses == {"narrow": ["R>I@tp nothing / keep_first"], "wide": []}
    reduced = [(c.where, c.count) for c in program.collectives if c.op == "all_reduce" and c.bytes == 8 * 4]
    assert reduced == [("gradients", 1)]
