"""What of a recorded run a gradient reaches: the graph of autograd, walked back from the loss.

What is never used, or whose result is thrown away, has no backward and causes no collectives there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from dtensor_lm.signatures import Value, value_of


class Reach:
    """Notes the tensors of a run while it runs; `settle` then says which of them matter."""

    def __init__(self) -> None:
        self.flows: list[tuple[Value, Node]] = []
        self.copies: list[tuple[Node, Callable[[str], str]]] = []

    def value(self, tensor: Tensor) -> Value:
        """What is recorded of a tensor; `settle` takes its mark `grad` off where no gradient comes."""
        value = value_of(tensor)
        if tensor.grad_fn is not None:
            self.flows.append((value, tensor.grad_fn))
        return value

    def copy(self, results: Sequence[Value], inputs: Iterable[Any], moved: Callable[[str], str]) -> list[Tensor]:
        """Outputs of a layer that is like an earlier one, without running it. moved: its names from the earlier's."""
        start = torch.empty(0, device="meta", requires_grad=True)  # parameters, when no input has a gradient
        out = _Copied.apply(results, start, *(x for x in inputs if isinstance(x, Tensor)))
        node = next((x.grad_fn for x in out if x.grad_fn is not None), None)
        if node is not None:
            self.copies.append((node, moved))
        return list(out)

    def settle(self, out: Any, names: dict[int, str]) -> set[str]:
        """The parameters that the loss depends on, by the names of their ids; takes off marks of values it does not."""
        starts = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, tuple | list) else []
        left = [x.grad_fn for x in starts if isinstance(x, Tensor) and x.grad_fn is not None]
        seen: set[Any] = set(left)
        while left:
            for node, _ in left.pop().next_functions:
                if node is not None and node not in seen:
                    seen.add(node)
                    left.append(node)
        variables = [node.variable for node in seen if hasattr(node, "variable")]
        reached = {names[id(v)] for v in variables if id(v) in names}
        for node, moved in self.copies:
            if node in seen:
                reached |= {moved(name) for name in reached}
        for value, node in self.flows:
            value.grad = value.grad and node in seen
        return reached


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, results: Sequence[Value], *inputs: Tensor) -> tuple[Tensor, ...]:
        out = tuple(torch.empty(v.shape, dtype=getattr(torch, v.dtype), device="meta") for v in results)
        ctx.mark_non_differentiable(*(x for x, v in zip(out, results, strict=True) if not v.grad))
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Any:
        raise NotImplementedError("a recorded run has no backward")
