"""Ready plans. The classical names are differences between tables."""

from __future__ import annotations

from dtensor_lm.errors import PlanError, nearest
from dtensor_lm.sharding_plans.plan import Plan

# Names that a plan for every model may mention although a model lacks them.
COMMON = frozenset({
    "batch", "seq", "res", "embed", "heads", "kv_heads", "head_dim", "ffn", "vocab", "core_heads",
    "core_kv_heads", "q_seq", "kv_seq", "expert", "layers",
})  # fmt: skip
_TP = dict.fromkeys(("heads", "kv_heads", "core_heads", "core_kv_heads", "ffn", "vocab"), "tp")


def ddp() -> Plan:
    """Data parallelism: the batch over dp, everything else whole."""
    return Plan(compute={"batch": "dp"})


def zero1() -> Plan:
    """ZeRO-1 (Rajbhandari et al. 2020; Megatron's distributed optimizer): optimizer state over dp."""
    return Plan(compute={"batch": "dp"}, optimizer={"embed": "dp"})


def zero2() -> Plan:
    """ZeRO-2: gradients over dp too."""
    return Plan(compute={"batch": "dp"}, gradients={"embed": "dp"}, optimizer={"embed": "dp"})


def zero3() -> Plan:
    """ZeRO-3 (FSDP; Zhao et al. 2023): parameters over dp too, gathered on use."""
    return Plan(compute={"batch": "dp"}, storage={"embed": "dp"})


def fsdp() -> Plan:
    """ZeRO-3 over an axis called fsdp."""
    return Plan(compute={"batch": "fsdp"}, storage={"embed": "fsdp"})


def hsdp() -> Plan:
    """Hybrid sharding: parameters over fsdp, copies over dp."""
    return Plan(compute={"batch": ("dp", "fsdp")}, storage={"embed": "fsdp"})


def tp() -> Plan:
    """Tensor parallelism (Shoeybi et al. 2019): heads, feed-forward and vocabulary over tp."""
    return Plan(compute=_TP, optional=COMMON)


def tp_sp() -> Plan:
    """Tensor with sequence parallelism (Korthikanti et al. 2022): the residual stream's sequence over tp."""
    return Plan(compute={**_TP, "res": "tp"}, optional=COMMON)


def standard(zero: int = 0, sequence_parallel: bool = True, whole_gradients: bool = False) -> Plan:
    """The plan that gives the axes dp, fsdp, tp and pp their usual meanings, so that a mesh needs no plan file.

    zero: how far ZeRO goes over dp: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (fsdp
    always shards all three). sequence_parallel: the residual stream's sequence over tp. whole_gradients: gradients are
    not sharded while they accumulate, as pipeline schedules need that split a backward in two.
    """
    if zero not in (0, 1, 2, 3):
        raise PlanError(f"zero is {zero!r}: use 0, 1, 2 or 3")
    if zero == 2 and whole_gradients:
        raise PlanError("zero is 2, which shards gradients, and whole_gradients says not to: use zero 1 or 3")
    wide, narrow = ("fsdp", "dp"), ("fsdp",)
    sequence = {"res": "tp"} if sequence_parallel else {}
    return Plan(
        compute={"batch": ("dp", "fsdp"), **_TP, **sequence, "layers": "pp"},
        storage={"embed": wide if zero >= 3 else narrow},
        gradients={"embed": () if whole_gradients else wide if zero >= 2 else narrow},
        optimizer={"embed": wide if zero >= 1 else narrow},
        optional=COMMON,
    )


NAMED = {
    "standard": standard,
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tp": tp,
    "tp_sp": tp_sp,
}


def named(name: str) -> Plan:
    """A ready plan by name. Raises `PlanError` with the nearest names."""
    if name not in NAMED:
        raise PlanError(f"unknown plan {name!r}{nearest(name, NAMED)}; known: {', '.join(NAMED)}")
    return NAMED[name]()
