"""The order in which a model calls its units, and where it may be cut into stages of a pipeline.

A unit is a maximal region below the model. Stage by stage, the model's own forward runs: up to the call of the next
stage's first unit, whose arguments are handed over. So a cut is possible before a unit if nothing else that an earlier
unit gave is used at or after it. This is seen on the recorded run, in the storages that go in and out of each
operation, so that nothing is missed that has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dtensor_lm.signatures import Value


@dataclass
class Link:
    """One call of a unit by the model itself, in the order of the calls.

    takes: its arguments that depend on the link before, or on the model's own parameters. cost: floating-point
    operations of matrices and the elements that any operation wrote, forward.
    """

    unit: str
    takes: dict[str, Value] = field(default_factory=dict)
    gives: list[Value | None] = field(default_factory=list)
    single: bool = True
    cost: float = 0.0


@dataclass
class Chain:
    """links: in order. barred: why no cut is possible before a link, by its number. gaps: the model's own parameters
    -> the numbers of the links before which (or, the last, after which) its own code uses them."""

    links: list[Link] = field(default_factory=list)
    barred: dict[int, str] = field(default_factory=dict)
    gaps: dict[str, set[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Origin:
    """Where a tensor comes from: the number of the last link that it depends on (-1: of none), and of which of the
    model's own parameters, if of no link."""

    link: int = -1
    parameters: frozenset[str] = frozenset()


class ChainRecorder:
    """Fills a `Chain` while a model runs. storage: of the model's parameters, by the id of their storage."""

    def __init__(self, storage: dict[int, str]) -> None:
        self.chain = Chain()
        self.storage = storage
        self._origins: dict[int, _Origin] = {}
        self._kept: list[Tensor] = []  # so that no storage's id comes back for another
        self._inside: Link | None = None

    def enter(self, unit: str, arguments: dict[str, tuple[Tensor, Value]], single: bool) -> None:
        """The model calls a unit."""
        number, link = len(self.chain.links), Link(unit, single=single)
        for name, (tensor, value) in arguments.items():
            origin = self._origin(tensor)
            if origin.link < 0 and not origin.parameters:
                continue
            link.takes[name] = value
            self._use(origin, number, unit)
            if not tensor.is_floating_point():
                self._bar(number, f"{unit} takes {name}, integers that are computed from {self._name(origin.link)}")
        self.chain.links.append(link)
        self._inside = link

    def leave(self, outputs: Iterable[tuple[Tensor, Value] | None]) -> None:
        """The unit returns."""
        number, link = len(self.chain.links) - 1, self.chain.links[-1]
        for output in outputs:
            link.gives.append(None if output is None else output[1])
            if output is not None:
                self._set(output[0], _Origin(number))
        self._inside = None

    def operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Any operation; those outside of units are the model's own."""
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._pay(_flops(func, args, kwargs, out) + sum(x.numel() for x in results))
        if self._inside is not None:
            return
        gap = len(self.chain.links)
        origins = [self._origin(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        parameters = frozenset[str]().union(*(o.parameters for o in origins))
        link = max((o.link for o in origins), default=-1)
        for origin in origins:
            self._use(origin, gap - 1, "the model's own code", mixed=link >= 0)
        after = _Origin(gap - 1) if link >= 0 else _Origin(-1, parameters)
        for x in results:
            self._set(x, after)

    def end(self, outputs: Iterable[Tensor]) -> None:
        """What the model returns."""
        for x in outputs:
            self._use(self._origin(x), len(self.chain.links) - 1, "what the model returns", mixed=True)

    def again(self, cost: float) -> None:
        """A unit that is like an earlier one, and was not run."""
        self._pay(cost)

    @property
    def spent(self) -> float:
        """Cost of the unit that runs, until now."""
        return self._inside.cost if self._inside is not None else 0.0

    def _pay(self, cost: float) -> None:
        links = self.chain.links
        if self._inside is not None:
            self._inside.cost += cost
        elif links:
            links[-1].cost += cost

    def _origin(self, x: Tensor) -> _Origin:
        key = x.untyped_storage()._cdata
        if key in self.storage:
            return _Origin(-1, frozenset({self.storage[key]}))
        return self._origins.get(key, _Origin())

    def _set(self, x: Tensor, origin: _Origin) -> None:
        self._kept.append(x)
        self._origins[x.untyped_storage()._cdata] = origin

    def _use(self, origin: _Origin, number: int, who: str, mixed: bool = True) -> None:
        """A tensor is used by link `number`, or after it: cuts between that and its origin would lose it."""
        last = number if who in ("the model's own code", "what the model returns") else number - 1
        for cut in range(origin.link + 1, last + 1) if origin.link >= 0 else ():
            self._bar(cut, f"{who} uses what {self._name(origin.link)} gave")
        if mixed:
            for name in origin.parameters:
                self.chain.gaps.setdefault(name, set()).add(last + 1)

    def _bar(self, cut: int, why: str) -> None:
        self.chain.barred.setdefault(cut, why)

    def _name(self, link: int) -> str:
        return self.chain.links[link].unit if link >= 0 else "the model's own code"


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    count = flop_registry.get(func._overloadpacket)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0


def layer_of(unit: str) -> str:
    """`blocks.3` of `blocks.3.attention`: up to the first number in a path; '' without one."""
    parts = unit.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if place is None else ".".join(parts[: place + 1])


def layer_starts(chain: Chain) -> list[int]:
    """The number of the first link of each layer; every link is a layer where the model has no lists of modules."""
    layers = [layer_of(link.unit) for link in chain.links]
    if not any(layers):
        return list(range(len(layers)))
    return [i for i, layer in enumerate(layers) if layer and (i == 0 or layers[i - 1] != layer)]


def balance(costs: list[float], allowed: list[bool], parts: int) -> list[int] | None:
    """How many of the items in order each part gets, so that the dearest part costs least; then, that the squares do.

    allowed: whether a part may begin with the item. Every part gets at least one; None if that is impossible.
    """
    n = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best: list[tuple[float, float, int]] = [(0.0, 0.0, 0)] + [(math.inf, math.inf, 0)] * n
    choice: list[list[int]] = []
    for part in range(parts):
        after = [(math.inf, math.inf, 0)] * (n + 1)
        for stop in range(part + 1, n - (parts - part - 1) + 1):
            for start in range(part, stop):
                if best[start][0] == math.inf or (start and not allowed[start]):
                    continue
                cost = before[stop] - before[start]
                found = (max(best[start][0], cost), best[start][1] + cost * cost, start)
                after[stop] = min(after[stop], found)
        best = after
        choice.append([start for _, _, start in best])
    if best[n][0] == math.inf:
        return None
    counts, stop = [], n
    for part in reversed(range(parts)):
        start = choice[part][stop]
        counts.append(stop - start)
        stop = start
    return counts[::-1]
