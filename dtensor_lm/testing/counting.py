"""Counts the collectives that a piece of code really issues, below every layer of ours."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_lm.collectives import group_of
from dtensor_lm.edges import Collective
from dtensor_lm.mesh import Mesh

Counts = Counter[tuple[str, tuple[str, ...], str, int]]  # (op, axes, dtype, bytes) -> times

# Operator -> (name in a Program, how many times the input the larger side is).
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", False),
    "all_reduce_": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "all_gather_into_tensor_out": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
}


class CountCollectives(TorchDispatchMode):
    """Within it, every collective is noted: `counts` by (op, axes, dtype, bytes of the larger side).

    Functional collectives and those of `torch.distributed` itself are seen; one that is not known is noted under its
    operator's name, so that it can never pass unseen.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.counts: Counts = Counter()
        self.axes: dict[str, tuple[str, ...]] = {}
        for n in range(len(mesh.active), 0, -1):
            for axes in combinations(mesh.active, n):
                self.axes[group_of(mesh, axes).name] = axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "_c10d_functional" and name in _FUNCTIONAL:
            op, gathered = _FUNCTIONAL[name]
            tensor: Tensor = args[0]
            group = next(a for a in reversed(args) if isinstance(a, str))
            axes = self.axes.get(group, (f"group {group}",))
            size = tensor.numel() * tensor.element_size() * (args[1] if gathered else 1)
            self.counts[op, axes, str(tensor.dtype).removeprefix("torch."), size] += 1
        elif space in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and name != "wait_tensor":
            self.counts[func._schema.name, ("unknown",), "", 0] += 1
        return func(*args, **(kwargs or {}))


def predicted(collectives: tuple[Collective, ...]) -> Counts:
    """What a Program says, in the same form."""
    counts: Counts = Counter()
    for c in collectives:
        counts[c.op, c.axes, c.dtype, c.bytes] += c.count
    return counts


def differences(expected: Counts, found: Counts) -> list[str]:
    """One line for each collective whose number differs."""
    lines = []
    for key in sorted({*expected, *found}):
        if expected[key] != found[key]:
            op, axes, dtype, size = key
            lines.append(
                f"{op} @{'.'.join(axes)} {dtype} of {size} bytes: predicted {expected[key]}, found {found[key]}"
            )
    return lines
