"""The part of a model's forward that one stage of a pipeline runs.

The model's own code runs on every stage. Before the stage's first unit its units give stand-ins, whose values reach
nothing; the first one is given what the stage before handed over; and where the next stage's
first unit is called, the forward ends with that unit's arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dtensor_lm.layout import Layout
from dtensor_lm.sharding_plans.pipeline import Link, Pipeline


class HandedOver(BaseException):
    """Ends a stage's forward; holds what the next stage takes. No error: nobody else may catch it."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors


class Span:
    """The links of one stage, in front of the units of a model. place: of this rank; None for whole tensors."""

    def __init__(self, pipeline: Pipeline, stage: int, place: Mapping[str, int] | None, device: torch.device) -> None:
        here = pipeline.stages[stage]
        self.first, self.stop = here.first, here.stop
        self.links = pipeline.links
        self.takes = tuple(pipeline.takes(stage).values())
        last = stage + 1 == len(pipeline.stages)
        self.hands = () if last else tuple(pipeline.takes(stage + 1).values())
        self.place, self.device = place, device
        self.received: Sequence[Tensor] = ()
        self.position: int | None = None  # of the next link, within the model's forward
        self.stand_ins: dict[Layout, Tensor] = {}
        self.stands_for = WeakTensorKeyDictionary()  # argument of the first unit -> what it was given instead

    def shapes(self, layouts: Sequence[Layout]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Local shapes and dtypes."""
        return [
            (layout.shape if self.place is None else layout.local_shape(self.place), getattr(torch, layout.dtype))
            for layout in layouts
        ]

    def watch(self, module: nn.Module, binder: Callable[..., inspect.BoundArguments]) -> None:
        """Puts itself in front of a unit's forward. binder: of the arguments of its own code."""
        forward = module.forward

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.position is None:  # computed again in backward, with the arguments that the model gave
                return forward(*map(self._real, args), **{n: self._real(x) for n, x in kwargs.items()})
            at, self.position = self.position, self.position + 1
            if at < self.first:
                return self._stand_in(self.links[at])
            if at not in (self.first, self.stop):
                return forward(*args, **kwargs)
            arguments = binder(*args, **kwargs)
            names = self.links[at].takes
            if at == self.stop:
                raise HandedOver(tuple(arguments.arguments[name] for name in names))
            if self.first:
                for name, x in zip(names, self.received, strict=True):
                    self.stands_for[arguments.arguments[name]] = x
                    arguments.arguments[name] = x
            return forward(*arguments.args, **arguments.kwargs)

        module.forward = run

    def run(self, model: Callable[..., Any], received: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> Any:
        """The stage's forward: the loss on the last one, else the tuple that the next one takes."""
        if [(tuple(x.shape), x.dtype) for x in received] != self.shapes(self.takes):
            raise ValueError(f"this stage takes {self.shapes(self.takes)}, not {[tuple(x.shape) for x in received]}")
        self.received, self.position = received, 0
        try:
            out = model(**inputs)
        except HandedOver as end:
            return end.tensors
        finally:
            self.received, self.position = (), None
        return out

    def _real(self, x: Any) -> Any:
        return self.stands_for.get(x, x) if isinstance(x, Tensor) else x

    def _stand_in(self, link: Link) -> Any:
        out = tuple(None if layout is None else self.any_values(layout) for layout in link.gives)
        return out[0] if link.single else out

    def any_values(self, layout: Layout) -> Tensor:
        """A tensor of a local shape, always in the same memory; it may be written to."""
        if layout not in self.stand_ins:
            ((shape, dtype),) = self.shapes([layout])
            self.stand_ins[layout] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self.stand_ins[layout].detach()
