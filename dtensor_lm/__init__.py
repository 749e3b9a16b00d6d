"""dtensor_lm: training of language models where parallelism is data.

A model names its dimensions, a plan maps names to mesh axes, and every layout and every collective, forward and
backward, follows from those two tables.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module; loaded when first asked for, so that the command line answers before torch is imported.
_WHERE = {
    "Mesh": "mesh", "Plan": "sharding_plans.plan", "Program": "sharding_plans.program", "Region": "region",
    "resolve": "sharding_plans.resolve", "partition": "partition", "abstract": "initial_values",
    "train_step": "training.step",
    "Feed": "training.feed", "TrainState": "state", "adamw": "training.optimizer", "sgd": "training.optimizer",
    "UserError": "errors", "PlanError": "errors", "MeshError": "errors", "ModelError": "errors",
    "ConfigError": "errors", "DataError": "errors", "ScheduleError": "errors",
}  # fmt: skip
_MODULES = {
    "plans": "sharding_plans",
    "models": "models",
    "data": "data",
    "schedules": "schedules",
    "testing": "testing",
}

if TYPE_CHECKING:
    from dtensor_lm import data as data
    from dtensor_lm import models as models
    from dtensor_lm import schedules as schedules
    from dtensor_lm import sharding_plans as plans
    from dtensor_lm import testing as testing
    from dtensor_lm.errors import ConfigError, DataError, MeshError, ModelError, PlanError, ScheduleError, UserError
    from dtensor_lm.initial_values import abstract
    from dtensor_lm.mesh import Mesh
    from dtensor_lm.partition import partition
    from dtensor_lm.region import Region
    from dtensor_lm.sharding_plans.plan import Plan
    from dtensor_lm.sharding_plans.program import Program
    from dtensor_lm.sharding_plans.resolve import resolve
    from dtensor_lm.state import TrainState
    from dtensor_lm.training.feed import Feed
    from dtensor_lm.training.optimizer import adamw, sgd
    from dtensor_lm.training.step import train_step

__all__ = [
    "ConfigError", "DataError", "Feed", "Mesh", "MeshError", "ModelError", "Plan", "PlanError", "Program", "Region",
    "ScheduleError", "TrainState", "UserError", "abstract", "adamw", "data", "models", "partition", "plans", "resolve",
    "schedules", "sgd", "testing", "train_step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = globals()[name] = getattr(importlib.import_module(f"dtensor_lm.{_WHERE[name]}"), name)
        return value
    if name in _MODULES:
        return importlib.import_module(f"dtensor_lm.{_MODULES[name]}")
    raise AttributeError(f"module 'dtensor_lm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
    """Importing `dtensor_lm.partition` would put the module in the place of the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "partition" and isinstance(value, types.ModuleType):
            value = value.partition
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
