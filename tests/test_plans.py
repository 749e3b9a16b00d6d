"""Plans as data: tables that inherit, combination, reading, and every message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dtensor_lm.errors import PlanError
from dtensor_lm.sharding_plans import NAMED, Plan, ddp, hsdp, named, standard, tp, tp_sp, zero1, zero2, zero3
from dtensor_lm.sharding_plans.plan import TABLES

pytestmark = pytest.mark.quick

NOT_AXES = (
    "is not a name and its axes, such as embed: fsdp, or a list of axes, outer to inner, such as embed: [fsdp, dp]"
)


@contextmanager
def fails(title: str, *faults: str) -> Iterator[None]:
    with pytest.raises(PlanError) as error:
        yield
    assert str(error.value) == "\n".join([title, *(f"  - {fault}" for fault in faults)])


def test_each_table_says_what_differs_from_the_one_before() -> None:
    plan = Plan(compute={"ffn": "tp"}, storage={"embed": "fsdp"}, gradients={"embed": ("fsdp", "dp")})
    assert [plan.axes(table, "ffn") for table in TABLES] == [("tp",)] * 4
    assert [plan.axes(table, "embed") for table in TABLES] == [(), ("fsdp",), ("fsdp", "dp"), ("fsdp",)]
    assert [plan.axes(table, "absent") for table in TABLES] == [()] * 4
    whole = Plan(compute={"ffn": "tp"}, storage={"ffn": ()})
    assert [whole.axes(table, "ffn") for table in TABLES] == [("tp",), (), (), ()]


def test_the_classical_names_are_differences() -> None:
    embed = {
        name: [plan.axes(table, "embed") for table in TABLES]
        for name, plan in (
            ("ddp", ddp()),
            ("zero1", zero1()),
            ("zero2", zero2()),
            ("zero3", zero3()),
            ("hsdp", hsdp()),
        )
    }
    none, dp, fsdp = (), ("dp",), ("fsdp",)
    assert embed == {
        "ddp": [none, none, none, none],
        "zero1": [none, none, none, dp],
        "zero2": [none, none, dp, dp],
        "zero3": [none, dp, dp, dp],
        "hsdp": [none, fsdp, fsdp, fsdp],
    }
    assert tp_sp().axes("compute", "res") == ("tp",)
    assert tp().axes("compute", "res") == ()
    wide = [[standard(zero).axes(table, "embed") for table in TABLES[1:]] for zero in range(4)]
    assert wide == [
        [fsdp, fsdp, fsdp],
        [fsdp, fsdp, ("fsdp", "dp")],
        [fsdp, ("fsdp", "dp"), ("fsdp", "dp")],
        [("fsdp", "dp")] * 3,
    ]


def test_named_plans() -> None:
    for name, make in NAMED.items():
        assert named(name) == make()
    with fails("unknown plan 'zero4' (did you mean zero3 or zero2 or zero1?); known: " + ", ".join(NAMED)):
        named("zero4")
    with fails("unknown plan 'xyz'; known: " + ", ".join(NAMED)):
        named("xyz")


@pytest.mark.parametrize("name", NAMED)
def test_plans_survive_json(name: str) -> None:
    plan = named(name)
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_combining() -> None:
    both = ddp() | tp_sp()
    assert both.axes("compute", "batch") == ("dp",)
    assert both.axes("compute", "res") == ("tp",)
    assert ddp() | ddp() == ddp()
    assert (Plan(regather=False) | Plan()).regather is False


def test_a_name_stays_optional_unless_one_plan_needs_it() -> None:
    assert "kv_heads" in (ddp() | tp()).optional
    assert "batch" not in (ddp() | tp()).optional
    assert "kv_heads" not in (tp() | Plan(compute={"kv_heads": "tp"})).optional


@pytest.mark.case("UX-01")
def test_plans_that_disagree() -> None:
    mine = Plan(compute={"batch": "dp", "ffn": "tp"}, storage={"embed": "fsdp"})
    other = Plan(compute={"batch": ("dp", "fsdp"), "ffn": "tp"}, storage={"embed": ()})
    with fails(
        "these plans cannot be combined:",
        "compute: batch is (dp) in one plan and (dp, fsdp) in the other",
        "storage: embed is (fsdp) in one plan and () in the other",
    ):
        mine | other


def test_every_fault_of_a_plan_in_code() -> None:
    with fails(
        "this plan cannot be read:",
        f"compute: 'batch' -> 3 {NOT_AXES}",
        "compute: ffn -> ('tp', 'tp') names an axis twice",
        f"storage: 'embed' -> 'fsdp,dp' {NOT_AXES}",
        f"gradients: 'embed' -> '' {NOT_AXES}",
        f"optimizer: 7 -> 'dp' {NOT_AXES}",
        "optional: 'embed' is not a list of names",
    ):
        Plan(
            compute={"batch": 3, "ffn": ("tp", "tp")},
            storage={"embed": "fsdp,dp"},
            gradients={"embed": ""},  # type: ignore[dict-item]
            optimizer={7: "dp"},
            optional="embed",  # type: ignore[dict-item, arg-type]
        )


def test_every_fault_of_a_plan_file() -> None:
    with fails("plan.yaml is not a mapping with compute, storage, gradients, optimizer"):
        Plan.from_dict(["compute"], "plan.yaml")
    with fails(
        "plan.yaml cannot be read:",
        "unknown table 'compte' (did you mean compute or optimizer?)",
        "storage: [] is not a mapping from names to their axes",
        "gradients: 0 is not a mapping from names to their axes",
        "regather: 'yes' is neither true nor false",
        f"compute: 'embed' -> None {NOT_AXES}",
        f"compute: 'ffn' -> ['tp', 4] {NOT_AXES}",
        "optional: [['embed']] is not a list of names",
    ):
        Plan.from_dict(
            {
                "compte": {},
                "storage": [],
                "gradients": 0,
                "regather": "yes",
                "compute": {"embed": None, "ffn": ["tp", 4]},
                "optional": [["embed"]],
            },
            "plan.yaml",
        )


def test_what_a_file_leaves_out() -> None:
    assert Plan.from_dict({}) == Plan()
    assert Plan.from_dict({"compute": None, "optional": None}) == Plan()
    read = Plan.from_dict({"compute": {"batch": ["dp", "fsdp"], "ffn": "tp"}, "regather": False, "optional": ["ffn"]})
    assert read == Plan(compute={"batch": ("dp", "fsdp"), "ffn": "tp"}, regather=False, optional=frozenset({"ffn"}))
