"""Counts the collectives that a piece of code really issues, below every layer of ours."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_lm.edges import Collective
from dtensor_lm.mesh import Mesh
from dtensor_lm.process_groups import names

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


_OTHER_SIDES = ("wait_tensor", "recv_")  # of what is counted where it begins


def _name_of(sender: Any) -> str:
    """The name of a process group as the dispatcher hands it over."""
    return str(dist.ProcessGroup.unbox(sender).group_name)


class CountCollectives(TorchDispatchMode):
    """Within it, every collective is noted: `counts` by (op, axes, dtype, bytes of the larger side).

    Functional collectives and those of `torch.distributed` itself are seen; one that is not known is noted under its
    operator's name, so that it can never pass unseen. A send is counted where it is sent.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.counts: Counts = Counter()
        self.mesh = mesh
        self.known: dict[str, tuple[str, ...]] = {}

    def _axes(self, group: str) -> tuple[str, ...]:
        if group not in self.known:  # it was made since
            self.known = names(self.mesh)
        return self.known.get(group, (f"group {group}",))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "_c10d_functional" and name in _FUNCTIONAL:
            op, gathered = _FUNCTIONAL[name]
            tensor: Tensor = args[0]
            group = next(a for a in reversed(args) if isinstance(a, str))
            axes = self._axes(group)
            size = tensor.numel() * tensor.element_size() * (args[1] if gathered else 1)
            self.counts[op, axes, str(tensor.dtype).removeprefix("torch."), size] += 1
        elif space == "c10d" and name == "send":
            ((tensor,), sender) = args[:2]
            axes = self._axes(_name_of(sender))
            size = tensor.numel() * tensor.element_size()
            self.counts["send", axes, str(tensor.dtype).removeprefix("torch."), size] += 1
        elif space in ("c10d", "_c10d_functional", "_c10d_functional_autograd") and name not in _OTHER_SIDES:
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
