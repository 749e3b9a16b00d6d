"""Whether a model's backward can be split in two halves, stage by stage, as torch's engine does it.

The engine runs the first half from the outputs of a stage to what the stage is handed, and notes the gradients at the
nodes of the graph where parameters come in; from there the second half runs, parameter by parameter. What a parameter
gives to the outputs without meeting anything that depends on what the stage is handed is lost. And a parameter that
comes in at two nodes is computed twice, or the engine fails. The first stage, which is handed nothing, is not split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.autograd.graph import Node

from dtensor_lm.layout import Layout
from dtensor_lm.models.single import drawing
from dtensor_lm.ops.dropout import Moment
from dtensor_lm.region import bind
from dtensor_lm.sharding_plans.pipeline import Pipeline
from dtensor_lm.spans import Span

MOST_NAMED = 4  # parameters of a fault


def faults_of_halves(model: nn.Module, pipeline: Pipeline, inputs: Mapping[str, Layout]) -> Iterator[str]:
    """Why a model (on the meta device) cannot have its backward split over these stages. inputs: of a micro-batch."""
    names = {id(p): name for name, p in model.named_parameters()}
    lost: dict[str, int] = {}
    twice: dict[str, int] = {}
    training = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        with drawing(model, Moment.of(0, 0, device="meta")), torch.enable_grad():
            for stage in pipeline.stages[1:]:
                for name, times in _entries(model, pipeline, stage.index, inputs, names):
                    if times != 1:
                        (twice if times else lost).setdefault(name, stage.index)
    finally:
        for module, mode in training:
            module.training = mode
    name = pipeline.schedule.name
    for found, what in (
        (lost, "gives its stage's outputs something that does not depend on what the stage is handed"),
        (twice, "is used more than once in a stage"),
    ):
        if found:
            some = ", ".join(f"{n} (stage {s})" for n, s in sorted(found.items())[:MOST_NAMED])
            more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
            yield (
                f"schedule {name} splits backward in two halves, and the second, of parameters, cannot be computed: "
                f"{some}{more} {what}: use a schedule that does not split, such as 1f1b or interleaved-1f1b"
            )


def _entries(
    model: nn.Module, pipeline: Pipeline, stage: int, inputs: Mapping[str, Layout], names: Mapping[int, str]
) -> Iterator[tuple[str, int]]:
    """(parameter, number of nodes where it meets what depends on what the stage is handed; 0 where some of it does
    not) of every parameter that the stage's outputs depend on."""
    span = Span(pipeline, stage, None, torch.device("meta"))
    units = {link.unit: model.get_submodule(link.unit) for link in pipeline.links}
    received = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
                for shape, dtype in span.shapes(span.takes)]  # fmt: skip
    arguments = {n: torch.empty(layout.shape, dtype=torch.int64, device="meta") for n, layout in inputs.items()}
    try:
        for module in units.values():
            span.watch(module, bind(module.forward))
        out = span.run(model, received, arguments)
    finally:
        for module in units.values():
            module.__dict__.pop("forward", None)
    outputs = {x.grad_fn for x in (out if isinstance(out, tuple) else (out,)) if x.grad_fn is not None}
    users, leaves = _reversed(outputs)
    handed = {id(x) for x in received}
    through = _above([node for node, x in leaves.items() if id(x) in handed], users, set())
    for node, x in leaves.items():
        if id(x) in names:
            before = _above([node], users, through)
            entries = {user for each in before for user in users.get(each, ()) if user in through}
            yield names[id(x)], 0 if before & outputs else len(entries)


def _reversed(outputs: set[Node]) -> tuple[dict[Node, set[Node]], dict[Node, torch.Tensor]]:
    """(node -> the nodes that use it, node of a leaf -> the leaf) of the graph below some nodes."""
    users: dict[Node, set[Node]] = {}
    leaves: dict[Node, torch.Tensor] = {}
    left, seen = [*outputs], {*outputs}
    while left:
        node = left.pop()
        if hasattr(node, "variable"):
            leaves[node] = node.variable
        for below, _ in node.next_functions:
            if below is not None:
                users.setdefault(below, set()).add(node)
                if below not in seen:
                    seen.add(below)
                    left.append(below)
    return users, leaves


def _above(start: list[Node], users: Mapping[Node, set[Node]], until: set[Node]) -> set[Node]:
    """All nodes that depend on some, and those; not those of `until`, nor what is reached through them only."""
    seen, left = {*start}, [*start]
    while left:
        for user in users.get(left.pop(), ()):
            if user not in seen and user not in until:
                seen.add(user)
                left.append(user)
    return seen
