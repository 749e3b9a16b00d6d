"""Every step runs the same operators with the same numbers: nothing that changes from step to step, or from layer to
layer, is a Python number, so a compiler would see one graph. (It is not built yet: see test_not_built.py.)

Sources: pytorch/pytorch#120934, pytorch/pytorch#130467, pytorch/torchtitan#2823.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from case_models import TINY, tiny
from case_runs import Run, batch_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor_lm as dl
from dtensor_lm import Mesh
from dtensor_lm.partition import _UnitCall
from dtensor_lm.testing.equivalence import parts
from dtensor_lm.training.learning_rate import cosine

STEPS = 12


def shown(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.shape, x.stride()
    return [shown(each) for each in x] if isinstance(x, (list, tuple)) else x


class Operators(TorchDispatchMode):
    """Within it, every operator is noted with its numbers, and with the shapes of its tensors instead of their values;
    those of each unit's forward once more by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.every: list[Any] = []
        self.units: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.every.append((func.name(), shown(args), shown(list(kwargs.items()))))
        return func(*args, **kwargs)

    def of_units(self) -> Any:
        call = _UnitCall.__call__

        def noted(unit: _UnitCall, *args: Any, **kwargs: Any) -> Any:
            start = len(self.every)
            out = call(unit, *args, **kwargs)
            self.units.append((type(unit.call.run.__self__).__name__, self.every[start:]))
            return out

        return mock.patch.object(_UnitCall, "__call__", noted)


def gpt(**changes: Any) -> nn.Module:
    sizes = {name: size for name, size in TINY.items() if name != "kv_heads"}
    return dl.models.build("tiny-gpt", **{**sizes, "dropout": 0.5, "attention_dropout": 0.5, **changes})


def rates_of_every_step(run: Run, long: Run) -> list[float]:
    """On sequences of two lengths in turn, with an evaluation in between. Asserts that operators are the same."""
    optimizer, rate = dl.adamw(lr=1e-2), cosine(STEPS, 3, 0.1)
    steps = [dl.train_step(r.program(), optimizer, lr_schedule=rate, clip_norm=1.0, device="cpu") for r in (run, long)]
    state, found, rates = steps[0].init(), [], []
    for i in range(STEPS):
        step, length = steps[i % 2], (run, long)[i % 2].seq
        mine = parts(step.program, batch_of([length - i % 5, i % 7] * 2, length, seed=i), step.device)
        gradients, operators = step.gradients, Operators()

        def noted(*args: Any, gradients: Any = gradients, operators: Operators = operators) -> Any:
            with operators, operators.of_units():
                return gradients(*args)

        if i < 4 or i >= STEPS - 4:
            with mock.patch.object(step, "gradients", noted):
                state, metrics = step(state, mine)
            found.append(operators)
        else:
            state, metrics = step(state, mine)
        rates.append(metrics.lr)
        if i == STEPS // 2:
            step.evaluate(state, mine)
    for first in (0, 1):
        assert len(found[first].every) > 500
        assert all(operators.every == found[first].every for operators in found[first::2])
        blocks = [every for name, every in found[first].units if name == "Block"]
        assert len(blocks) == 4 * 2  # layers, micro-batches
        for micro in (blocks[:4], blocks[4:]):
            assert all(block == micro[0] for block in micro)
    assert found[0].every != found[1].every  # shapes are in it
    return rates


@pytest.mark.case("PERF-02")
@pytest.mark.parametrize("model", [tiny, gpt], ids=["llama", "gpt with dropout"])
def test_steps_and_layers_run_the_same_operators(model: Any) -> None:
    sizes = {"batch": 4, "micro_batches": 2, "model": model, "changes": {"layers": 4, "seq": 16}}
    runs = [Run(Mesh(tp=2), seq=seq, **sizes) for seq in (8, 16)]
    for rates in runs[0].everywhere(rates_of_every_step, runs[1]):
        assert len(set(rates)) > STEPS // 2
