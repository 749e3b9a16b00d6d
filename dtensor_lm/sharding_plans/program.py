"""A Program: every layout and every collective of a training step, as pure data. The runtime executes it, the command
line prints it, the tests prove it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtensor_lm.edges import Collective, Step
from dtensor_lm.layout import ITEMSIZE, Layout
from dtensor_lm.mesh import Mesh
from dtensor_lm.sharding_plans.pipeline import Pipeline
from dtensor_lm.sharding_plans.plan import Plan

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Hop:
    """One axis put on (or taken off) the inner end of one dim."""

    axis: str
    dim: int


def hops(short: Layout, long: Layout) -> tuple[Hop, ...]:
    """What `long` cuts beyond `short`, outer to inner within each dim."""
    return tuple(
        Hop(axis, i)
        for i, (a, b) in enumerate(zip(short.dims, long.dims, strict=True))
        for axis in b.axes[len(a.axes) :]
    )


@dataclass(frozen=True)
class Parameter:
    """Layouts of one parameter. `gathered` is what regions use: the compute cut, whole over the axes of storage."""

    name: str
    spec: str
    decay: bool
    gathered: Layout
    storage: Layout
    gradients: Layout
    optimizer: Layout

    @property
    def reductions(self) -> tuple[Hop, ...]:
        """Hops from the gradients' layout to the optimizer's: once a step."""
        return hops(self.gradients, self.optimizer)

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        """Axes over which the gradient is still addends in the optimizer's layout: one all-reduce."""
        return tuple(axis for axis in self.optimizer.mesh.active if self.optimizer.state(axis) == "R")


@dataclass(frozen=True)
class Edge:
    """A tensor that crosses the border of a region: from one layout to another."""

    region: str
    tensor: str
    kind: str  # input, output or parameter
    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    count: int  # crossings per step
    grad: bool
    parameter: str = ""


@dataclass(frozen=True)
class Gather:
    """Parameters of one unit whose storage or gradients are cut further than their use: one collective per round.

    Forward, `gather` axes come off (inner first); backward, gradients are reduce-scattered over `scatter` axes.
    regather: whether what was gathered is released after forward, and gathered again `again` times a step.
    """

    unit: str
    parameters: tuple[str, ...]
    gather: tuple[str, ...]
    scatter: tuple[str, ...]
    regather: bool
    count: int
    backward: bool = True  # whether a gradient reaches any of them
    again: int = 0  # gathers in backward


@dataclass(frozen=True)
class RegionPlan:
    """What the runtime does at the border of one region."""

    path: str
    unit: str
    inputs: dict[str, Edge]
    outputs: tuple[Edge | None, ...]
    parameters: dict[str, Edge]
    indices: dict[str, tuple[str, int, tuple[str, ...]]]  # argument -> (name, global size, axes)
    reducers: dict[str, tuple[str, ...]]  # argument -> axes
    randoms: dict[str, Layout]  # argument -> the layout of its numbers in a micro-batch
    live: frozenset[str]
    exchanges: tuple[Collective, ...] = ()  # that it makes itself over the parts of a name
    absent: dict[str, Layout] = field(default_factory=dict)  # parameters that this stage of a pipeline does not use

    @property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(e for e in (*self.parameters.values(), *self.inputs.values(), *self.outputs) if e is not None)


@dataclass
class Program:
    """Everything that follows from a model, a plan and a mesh. Made by `resolve`.

    In a pipeline, layouts are on the mesh without the pipeline's axis, `parts` says what one rank runs, and the
    collectives are those of all pipeline ranks, one after the other.
    """

    mesh: Mesh
    plan: Plan
    batch: int
    seq: int
    micro_batches: int
    dtype: str
    parameters: dict[str, Parameter]
    regions: dict[str, RegionPlan]
    gathers: tuple[Gather, ...]
    sizes: dict[str, int]  # of every name, where a region first has it
    inputs: dict[str, Layout]  # integer inputs of the model, one micro-batch
    output: Layout  # of the loss
    model: nn.Module = field(repr=False)
    pipeline: Pipeline | None = None
    held: tuple[int, ...] | None = None  # the stages that this is a part for; None: all
    by_rank: tuple[tuple[Collective, ...], ...] = ()  # collectives of a step, for each pipeline rank

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(c for collectives in self.by_rank for c in collectives)

    @property
    def edges(self) -> tuple[Edge, ...]:
        return tuple(edge for region in self.regions.values() for edge in region.edges)

    def home(self, parameter: str, rank: int) -> bool:
        """Whether a parameter that several pipeline ranks store counts on this rank."""
        if self.pipeline is None:
            return True
        return self.pipeline.ranks_of(parameter)[0] == self.mesh.coordinate(rank)[self.pipeline.axis]

    @property
    def master_dtype(self) -> str:
        """Master weights, moments and gradients: at least float32."""
        return self.dtype if ITEMSIZE[self.dtype] >= 4 else "float32"

    def gathers_of(self, unit: str) -> Iterator[Gather]:
        return (g for g in self.gathers if g.unit == unit)

    def bytes_per_rank(self) -> dict[str, int]:
        """Bytes of state on the rank that holds the most (without a pipeline, rank 0): parameters, gradients, optimizer
        (AdamW: two moments, and master weights where parameters are narrower)."""
        if self.pipeline is not None and self.held is None:
            parts = [self._bytes(self.stored_on(rank)) for rank in range(self.mesh[self.pipeline.axis])]
            return max(parts, key=lambda part: sum(part.values()))
        return self._bytes(self.parameters.values())

    def stored_on(self, rank: int) -> list[Parameter]:
        """The parameters of a pipeline rank."""
        pipe = self.pipeline
        return [p for name, p in self.parameters.items() if pipe is None or rank in pipe.ranks_of(name)]

    def _bytes(self, p: Collection[Parameter]) -> dict[str, int]:
        masters = 1 if self.master_dtype != self.dtype else 0
        return {
            "parameters": sum(x.storage.local_bytes() for x in p),
            "gradients": sum(x.gradients.local_numel() * ITEMSIZE[self.master_dtype] for x in p),
            "optimizer": sum((2 + masters) * x.optimizer.local_bytes() for x in p),
        }

    def __str__(self) -> str:
        from dtensor_lm.sharding_plans.show import table

        return table(self)

    def as_dict(self) -> dict[str, object]:
        """The Program as JSON-able data."""
        from dtensor_lm.sharding_plans.show import data

        return data(self)
