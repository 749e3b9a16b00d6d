"""Plans, and the Programs made from them."""

from dtensor_lm.sharding_plans.library import (
    NAMED,
    ddp,
    fsdp,
    hsdp,
    named,
    standard,
    tp,
    tp_sp,
    zero1,
    zero2,
    zero3,
)
from dtensor_lm.sharding_plans.plan import Plan

__all__ = [
    "NAMED",
    "Plan",
    "ddp",
    "fsdp",
    "hsdp",
    "named",
    "standard",
    "tp",
    "tp_sp",
    "zero1",
    "zero2",
    "zero3",
]
