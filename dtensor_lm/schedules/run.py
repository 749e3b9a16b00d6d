"""A schedule executed by torch's own engine, `torch.distributed.pipelining`.

What the engine would do by habit, and what is asked of it instead:
- It divides gradients by the number of micro-batches: `scale_grads=False`, since losses are sums over tokens.
- Without the shapes of what stages exchange it runs one more forward and backward to find them: they are given.
- A second engine for evaluation, on the same stages, would spoil the receive buffers of the next training step, and its
  own `eval` hangs for tables in a V: so one engine has two tables, one of them with forwards only.
- It takes parameters from the stage's module, when it does the second half of a backward: the leaves of this step.
- After the second half of a backward it takes what autograd gives for a parameter's gradient, though two parameters may
  have been given one tensor, and adds to it later: so there is a gradient already, of zeros, to which it adds.
- It sends gradients as autograd makes them, and a gradient may be no contiguous tensor.

Parts of the engine whose names begin with an underscore are used, since no others can run a table of one's own: those
that tests/test_pipeline_engine.py names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _PipelineScheduleRuntime

from dtensor_lm.layout import Layout
from dtensor_lm.ops.dropout import Moment
from dtensor_lm.partition import Given, Partitioned
from dtensor_lm.process_groups import group
from dtensor_lm.schedules.table import Schedule
from dtensor_lm.sharding_plans.parts import stage_program
from dtensor_lm.sharding_plans.program import Program

Inputs = Mapping[str, Tensor]


@dataclass
class _Pass:
    """What all stages of this rank need for one run of the schedule. losses: of micro-batches, on the last stage."""

    leaves: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    moment: Moment
    rows: int  # of a micro-batch
    batch: Sequence[Inputs]
    losses: list[Tensor]


class PipelineRunner:
    """A Program's pipeline on this rank. Its ranks make it together, and call it together.

    model: of the Program, on the meta device. seed: what backward of a loss begins with.
    """

    def __init__(self, program: Program, model: nn.Module, device: torch.device, seed: Tensor) -> None:
        pipe = program.pipeline
        assert pipe is not None
        self.pipe, self.device = pipe, device
        self.rows = program.batch // program.micro_batches
        self.place = program.mesh.coordinate(dist.get_rank())
        ranks = group(program.mesh, (pipe.axis,))
        self.modules: list[_StageModule] = []
        stages = []
        for index in pipe.on(self.place[pipe.axis]):
            part = Partitioned(stage_program(program, index), model, device)
            module = _StageModule(part)
            assert part.span is not None
            last = index + 1 == len(pipe.stages)
            given = () if last else part.span.hands
            loss = torch.empty(1, dtype=getattr(torch, program.output.dtype), device="meta")
            output = self._examples(given) if given else (loss,)
            self.modules.append(module)
            stages.append(
                _Stage(module, index, len(pipe.stages), device, self._examples(part.span.takes), output, ranks)
            )
        self.count = pipe.schedule.micro_batches
        self.engine = _PipelineScheduleRuntime(
            stages, self.count, loss_fn=lambda out, _: out.sum() * seed.to(out.dtype), scale_grads=False
        )
        self.tables = {table.training: self._lowered(table) for table in (pipe.schedule, pipe.evaluation)}
        # Ranks agree here, and not within the first step, that all stages know their shapes.
        for stage in stages:
            stage.has_backward = True
        self.engine._initialize_stages((), {})

    def _examples(self, layouts: Sequence[Layout]) -> tuple[Tensor, ...]:
        """What crosses a border, as meta tensors."""
        return tuple(
            torch.empty(
                layout.local_shape(self.place), dtype=getattr(torch, layout.dtype), device="meta", requires_grad=True
            )
            for layout in layouts
        )

    def _lowered(self, table: Schedule) -> Any:
        """The engine's own form of a table, sends and receives added."""
        actions = {rank: [_Action.from_str(str(a)) for a in row] for rank, row in enumerate(table.rows)}
        if table.training:
            self.engine._prepare_schedule_with_comms({**actions})  # and tells all stages where the others are
            return self.engine.pipeline_order_with_comms
        return _add_send_recv(actions, lambda stage: table.placement[stage], table.stages)

    def train(self, leaves: Mapping[str, Tensor], values: Mapping[str, Tensor], moment: Moment,
              batch: Sequence[Inputs]) -> Tensor:  # fmt: skip
        """Fills the gradients of `leaves`; returns the sum of the losses, on other stages than the last 0."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for run in range(self.pipe.accumulate):
            first = run * self.count
            now = replace(moment, row=first * self.rows)
            total += self._run(True, _Pass(leaves, values, now, self.rows, batch[first : first + self.count], []))
        return total

    def evaluate(self, values: Mapping[str, Tensor], batch: Sequence[Inputs]) -> Tensor:
        """The sum of the losses of as many micro-batches as the schedule has."""
        return self._run(False, _Pass(values, values, Moment.of(0, 0, device=self.device), self.rows, batch, []))

    def _run(self, training: bool, given: _Pass) -> Tensor:
        for module in self.modules:
            module.begin(given, training)
        self.engine.pipeline_order_with_comms = self.tables[training]
        micro = torch.arange(self.count)
        try:
            # The engine wants gradients enabled, always; stages say for themselves.
            with _its_errors(), _without_its_log(), torch.enable_grad():
                self.engine.step(micro=micro, target=micro if self.has_last else None, return_outputs=False)
        finally:
            for module in self.modules:
                module.end()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in given.losses:
            total += loss.sum()
        return total

    @property
    def has_last(self) -> bool:
        return len(self.pipe.stages) - 1 in self.pipe.on(self.place[self.pipe.axis])


class _StageModule(nn.Module):
    """One stage as the engine sees it: (what the stage before hands over, number of the micro-batch) -> what the next
    one takes, or the loss."""

    def __init__(self, part: Partitioned) -> None:
        super().__init__()
        self.part = part
        self.given: _Pass | None = None
        self.kept: dict[int, Given | None] = {}  # micro-batch -> what its forward was given
        edges = (e for region in part.program.regions.values() for e in region.parameters.values())
        self.names = list(dict.fromkeys(e.parameter for e in edges))
        assert part.span is not None
        self.last = not part.span.hands

    def begin(self, given: _Pass, training: bool) -> None:
        self.given = given
        self.part.train(training)
        for leaf in self.parameters() if training and self.part.halves else ():
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf, dtype=getattr(torch, self.part.program.master_dtype))

    def end(self) -> None:
        self.given = None
        self.kept.clear()
        self.part.release()

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """The leaves of the running step, in the order of the units, where the engine looks for parameters."""
        leaves = self.given.leaves if self.given is not None else {}
        return iter([leaves[name] for name in self.names if leaves])

    def forward(self, *received: Tensor, micro: Tensor) -> Any:
        given, i = self.given, int(micro)
        assert given is not None
        moment = replace(given.moment, row=given.moment.row + i * given.rows)
        with torch.set_grad_enabled(self.part.training):
            taken = [_ContiguousGradient.apply(x) for x in received]
            out = self.part(given.leaves, given.values, moment, taken, **given.batch[i])
            self.kept[i] = self.part.given
            if self.last:
                given.losses.append(out.detach())
                return out.reshape(1)
            # The engine detaches them in place, which a view refuses, and sends them, which needs them in one piece.
            return tuple(x.clone() if x._is_view() else x.contiguous() for x in out)


class _Stage(PipelineStage):
    """After each backward what it gathered again is let go, so that another stage's backward finds the memory free."""

    def __init__(self, module: _StageModule, index: int, stages: int, device: torch.device,
                 takes: tuple[Tensor, ...], gives: tuple[Tensor, ...], ranks: dist.ProcessGroup) -> None:  # fmt: skip
        super().__init__(module, index, stages, device, input_args=takes, output_args=gives, group=ranks)
        self.module, self.takes = module, takes

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """What torch 2.11 sends to begin with; not to itself, which gloo cannot, where both stages are on one rank."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.module.part.given = self.module.kept[bwd_chunk_id]
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if grads := self.bwd_cache.get(bwd_chunk_id):
            # Of what a stage takes and no gradient reaches; the stage before waits for one.
            zeros = zip(grads, self.takes, strict=False)  # torch 2.11 has one more, of the micro-batch's number
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros(x.shape, dtype=x.dtype, device=self.device) if g is None else g for g, x in zeros
            )
        self.module.part.release()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.module.part.given = self.module.kept[bwd_chunk_id]
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self.module.part.release()


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


@contextmanager
def _its_errors() -> Iterator[None]:
    """The engine wraps what a stage raises into an error of its own, which begins with nothing: this raises it."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None:
            raise
        error.__cause__.add_note(" ".join(str(error).split()))
        raise error.__cause__ from None


class _without_its_log:
    """The engine logs the whole table where a step fails; the error itself says which stage and micro-batch it was."""

    def __enter__(self) -> None:
        self.logger = logging.getLogger("torch.distributed.pipelining.schedules")
        self.level = self.logger.level
        self.logger.setLevel(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        self.logger.setLevel(self.level)
