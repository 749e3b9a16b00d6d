"""A model whose layers sleep instead of computing, and write down when they did what.

Its gradients are right: a layer scales x by its weights. Batches number themselves: all tokens of micro-batch i are i.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

import dtensor_lm as dl
from dtensor_lm.schedules import Schedule

EMBED = 4


class Seconds(NamedTuple):
    """What a layer sleeps for one micro-batch."""

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0


class Event(NamedTuple):
    """What a layer did for a micro-batch. kind: F, or I or W, which a whole backward does one after the other.

    Times are of the machine's monotonic clock, which all processes share. alive: how many activations the layers of
    this process kept when it began, its own among them.
    """

    layer: int
    kind: str
    micro_batch: int
    start: float
    end: float
    alive: int


@dataclass
class Log:
    """Of this process. kept: the (layer, micro-batch) whose activation exists."""

    events: list[Event] = field(default_factory=list)
    kept: set[tuple[int, int]] = field(default_factory=set)

    def take(self) -> list[Event]:
        """What happened since the last call."""
        events, self.events = self.events, []
        return events

    def sleep(self, layer: int, kind: str, micro_batch: int, seconds: float) -> None:
        start, alive = time.monotonic(), len(self.kept)
        if seconds:
            time.sleep(seconds)
        self.events.append(Event(layer, kind, micro_batch, start, time.monotonic(), alive))

    def keep(self, activation: Tensor, layer: int, micro_batch: int) -> None:
        self.kept.add((layer, micro_batch))
        weakref.finalize(activation, self.kept.discard, (layer, micro_batch))


LOG = Log()


class _Late(torch.autograd.Function):
    """A copy of x whose gradient comes late. There is one for the input and one for the weights of a layer, as an
    operator in Python is asked for all of its gradients in both halves of a backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, kind: str, layer: int, micro_batch: int, seconds: float) -> Tensor:
        ctx.late = layer, kind, micro_batch, seconds  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        LOG.sleep(*ctx.late)
        return grads[0], None, None, None, None


class Table(nn.Module):
    region = dl.Region(
        inputs={"tokens": "int batch seq"},
        outputs="batch seq embed",
        params={"weight": "vocab embed"},
        cuts="batch seq",
    )

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab, EMBED))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Layer(nn.Module):
    region = dl.Region(
        inputs={"x": "batch seq embed", "tokens": "int batch seq"},
        outputs="batch seq embed",
        params={"weight": "embed"},
        cuts="batch seq",
    )

    def __init__(self, number: int, seconds: Seconds) -> None:
        super().__init__()
        self.number, self.seconds = number, seconds
        self.weight = nn.Parameter(torch.randn(EMBED))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        if x.is_meta:
            return x * self.weight
        micro_batch = int(tokens[0, 0])
        weight = _Late.apply(self.weight, "W", self.number, micro_batch, self.seconds.weight_grad)
        x = _Late.apply(x, "I", self.number, micro_batch, self.seconds.input_grad)
        LOG.keep(x, self.number, micro_batch)  # the product keeps it for the gradient of the weights
        LOG.sleep(self.number, "F", micro_batch, self.seconds.forward)
        return x * weight


class Loss(nn.Module):
    region = dl.Region(
        inputs={"x": "batch seq embed", "labels": "int batch seq"}, outputs="+batch +seq =", cuts="batch seq"
    )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (x.sum(-1) - labels).square().sum()


class Sleeping(nn.Module):
    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"}, outputs="+batch +seq =", cuts="batch seq"
    )

    def __init__(self, layers: int, vocab: int, seconds: Seconds) -> None:
        super().__init__()
        self.table, self.loss = Table(vocab), Loss()
        self.layers = nn.ModuleList(Layer(i, seconds) for i in range(layers))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x, tokens)
        return self.loss(x, labels)


class Step(NamedTuple):
    """One step of one rank, and what its layers did in it."""

    start: float
    end: float
    events: list[Event]


def steps(
    schedule: str,
    ranks: int,
    micro_batches: int,
    split: Sequence[int],
    seconds: Seconds,
    most: int,
    enough: float = 0.0,
) -> list[Step]:
    """This rank's steps of the product's own `train_step` on a mesh pp=ranks.

    split: layers of each stage. most: number of steps; after one that took all ranks at most `enough` seconds, no more.
    """
    model = dl.abstract(lambda: Sleeping(sum(split), micro_batches, seconds))
    program = dl.resolve(
        model, dl.plans.standard(whole_gradients=True), dl.Mesh(pp=ranks), seq=1, micro_batches=micro_batches,
        schedule=schedule, virtual_stages=len(split) // ranks, split=split,
    )  # fmt: skip
    step = dl.train_step(program, dl.sgd(lr=1e-6), device="cpu")
    state = step.init(seed=0)
    batch = [dict.fromkeys(("tokens", "labels"), torch.full((1, 1), i)) for i in range(micro_batches)]
    LOG.take()
    found: list[Step] = []
    while len(found) < most:
        dist.barrier()
        start = time.monotonic()
        state, _ = step(state, batch)
        found.append(Step(start, time.monotonic(), LOG.take()))
        times = torch.tensor([-start, found[-1].end], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if times.sum() <= enough:
            break
    return found


def expected(schedule: Schedule, rank: int, split: Sequence[int]) -> list[tuple[int, str, int]]:
    """(layer, kind, micro-batch) of a rank's events, as its row says. split: layers of each stage.

    The first stage, whose input has no gradient, does in torch's engine nothing in I, and its whole backward in W.
    """
    found = []
    for stage, kind, i in schedule.rows[rank]:
        layers = range(sum(split[:stage]), sum(split[: stage + 1]))
        if kind == "F":
            found += [(layer, "F", i) for layer in layers]
        elif kind == "B" or (kind == "W" and stage == 0):
            found += [(layer, half, i) for layer in reversed(layers) for half in "IW"]
        elif kind == "I" and stage:
            found += [(layer, "I", i) for layer in reversed(layers)]
        elif kind == "W":
            found += [(layer, "W", i) for layer in layers]
    return found
