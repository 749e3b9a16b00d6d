"""The training step: a pure function `state, metrics = step(state, batch)` whose old state is donated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_lm import process_groups
from dtensor_lm.collectives import all_reduce, group_of
from dtensor_lm.errors import ConfigError, ModelError
from dtensor_lm.initial_values import draw, recipes
from dtensor_lm.ops.cross_entropy import IGNORE
from dtensor_lm.ops.dropout import Moment
from dtensor_lm.rounds import BoundRound, BoundShare
from dtensor_lm.sharding_plans.parts import part
from dtensor_lm.sharding_plans.predict import STATISTICS, group_axes, reduction_rounds, shared_rounds, update_rounds
from dtensor_lm.sharding_plans.program import Parameter, Program
from dtensor_lm.state import TrainState, local, locals_of, narrow, take, wrap
from dtensor_lm.training.learning_rate import Schedule
from dtensor_lm.training.optimizer import SGD, AdamW, Group, Optimizer
from dtensor_lm.training.passes import InOrderRunner

if TYPE_CHECKING:
    from dtensor_lm.schedules.run import PipelineRunner

BlockMaker = Callable[[Parameter, str, torch.dtype], Tensor]  # (parameter, table, dtype) -> this rank's block
Batch = Sequence[Mapping[str, Tensor]]  # one mapping of this rank's integer inputs per micro-batch


@dataclass(frozen=True)
class Metrics:
    """Of one step, the same on every rank. loss: per unmasked token; grad_norm: before clipping; tokens: unmasked.

    not_finite: the parameters that are not, or whose gradients are not; such a step changes nothing.
    """

    loss: float
    grad_norm: float
    tokens: int
    lr: float
    not_finite: tuple[str, ...] = ()


class TrainStep:
    """A Program bound to this rank, with an optimizer. Made by `train_step`."""

    def __init__(
        self,
        program: Program,
        optimizer: Optimizer,
        lr_schedule: Schedule | None,
        clip_norm: float,
        device: torch.device,
    ) -> None:
        self.program, self.optimizer, self.lr_schedule = program, optimizer, lr_schedule
        self.clip_norm, self.device = clip_norm, device
        process_groups.start(device)
        program.mesh.check_world(dist.get_world_size())
        rank = dist.get_rank()
        process_groups.prepare(program.mesh, group_axes(program))
        self.place = program.mesh.coordinate(rank)
        self.local = part(program, rank)  # what this rank runs: its stages, in a pipeline
        self.parameters = self.local.parameters
        scatter, reduce = reduction_rounds(self.parameters)
        self.scatter = [BoundRound(r, program.mesh, rank) for r in scatter]
        self.reduce = [BoundRound(r, program.mesh, rank) for r in reduce]
        self.share = [BoundShare(places, r, program.mesh, rank) for places, r in shared_rounds(self.local)]
        self.update = [BoundRound(r, program.mesh, rank) for r in update_rounds(self.parameters)]
        self.world = group_of(program.mesh, program.mesh.active) if program.mesh.active else None
        self.master_dtype = getattr(torch, program.master_dtype)
        self.dtype = getattr(torch, program.dtype)
        if "labels" not in program.inputs or program.output.shape:
            raise ModelError("a model that is trained takes 'labels' and returns its loss, a scalar sum over tokens")
        # The loss and the token count are held in as many copies as there are ranks that do not cut them.
        layout = program.output
        self.loss_copies = layout.mesh.size // layout.mesh.product(layout.partial)
        self.label_copies = program.inputs["labels"].copies
        # In state R gradients are addends: the first rank alone brings the 1 that backward starts from.
        alone = all(self.place[axis] == 0 for axis in layout.mesh.active if layout.state(axis) == "R")
        seed = torch.tensor(1.0 if alone else 0.0, device=device)
        self.runner = _runner(program)(program, program.model, device, seed)

    # State

    def init(self, seed: int = 0) -> TrainState:
        """The initial state: values are a function of (seed, name, global index), each rank draws its own block.

        Raises `ModelError` for initialisers that cannot be reproduced on a shard.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(f"seed is {seed!r}: a whole number")
        known = recipes(self.program.model)

        def block(p: Parameter, table: str, dtype: torch.dtype) -> Tensor:
            layout = getattr(p, table)
            return draw(known[p.name], p.name, seed, layout.shape, layout.box(self.place), dtype, self.device)

        return replace(self._state(block), _seed=seed)

    def load(self, values: Mapping[str, Tensor], step: int = 0, seed: int = 0) -> TrainState:
        """A state from whole tensors (on every rank) instead of initialisers. seed: of dropout.

        Raises `ModelError` with every name that is missing, unknown, or of another shape.
        """
        known = self.program.parameters
        faults = [f"{n}: missing" for n in known if n not in values]
        faults += [f"{n}: the model has no such parameter" for n in values if n not in known]
        faults += [
            f"{n}: has shape {list(v.shape)}, the model {list(known[n].storage.shape)}"
            for n, v in values.items()
            if n in known and tuple(v.shape) != known[n].storage.shape
        ]
        if step < 0:
            faults.append(f"step is {step}: at least 0")
        if faults:
            raise ModelError("these values do not fit the model:", faults)

        def block(p: Parameter, table: str, dtype: torch.dtype) -> Tensor:
            return take(values[p.name].to(self.device, dtype), getattr(p, table))

        return replace(self._state(block), _step=step, _seed=seed)

    def _state(self, block: BlockMaker) -> TrainState:
        parameters: dict[str, DTensor] = {}
        optimizer: dict[str, dict[str, DTensor]] = {slot: {} for slot in self.optimizer.slots}
        if self.dtype != self.master_dtype:
            optimizer["master"] = {}
        for name, p in self.parameters.items():
            parameters[name] = wrap(block(p, "storage", self.dtype), p.storage)
            shape = p.optimizer.local_shape(self.place)
            for slot in self.optimizer.slots:
                zeros = torch.zeros(shape, dtype=self.master_dtype, device=self.device)
                optimizer[slot][name] = wrap(zeros, p.optimizer)
            if "master" in optimizer:
                optimizer["master"][name] = wrap(block(p, "optimizer", self.master_dtype), p.optimizer)
        return TrainState(parameters, optimizer)

    # One step

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step over all micro-batches. `batch` is this rank's part; `state` is donated.

        Where loss or norm is not finite, which all ranks see alike, parameters and moments stay as they are.
        """
        if isinstance(batch, Mapping) or len(batch) != self.program.micro_batches:
            if isinstance(batch, Mapping):
                raise ValueError("a batch is a list with one mapping of inputs per micro-batch")
            raise ValueError(f"{len(batch)} micro-batches, but the Program was made for {self.program.micro_batches}")
        missing = {*self.optimizer.slots} - {*state.optimizer}
        if missing or {*state.optimizer} - {*self.optimizer.slots, "master"}:
            raise ValueError(f"this state has {sorted(state.optimizer)}; the optimizer has {[*self.optimizer.slots]}")
        lr = self.optimizer.lr * (self.lr_schedule(state.step) if self.lr_schedule else 1.0)
        grads, loss, tokens, norm = self.gradients(state, batch)
        count = max(tokens, 1)
        scale = 1.0 / count
        if self.clip_norm:
            scale *= min(1.0, self.clip_norm / (norm + 1e-6))
        state = state.donate()
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            self._apply(state, grads, scale, lr)
        return state, Metrics(loss, norm, tokens, lr, () if finite else self._not_finite(state, grads))

    def gradients(self, state: TrainState, batch: Batch) -> tuple[dict[str, Tensor], float, int, float]:
        """(sums of gradients over tokens, in the optimizer's layout; mean loss; tokens; norm of the mean gradient)."""
        values = locals_of(state.parameters)
        leaves = {name: self._leaf(values[name], p) for name, p in self.parameters.items()}
        loss = self.runner.train(leaves, values, Moment.of(state.seed, state.step, device=self.device), batch)
        tokens = self._tokens(batch)
        grads = {}
        for name, leaf in leaves.items():
            grads[name] = torch.zeros_like(leaf, dtype=self.master_dtype) if leaf.grad is None else leaf.grad
            leaf.grad = None
        with torch.no_grad():
            for r in self.scatter:
                grads.update(r.scatter(grads))
            for r in self.reduce:
                grads.update(r.reduce(grads))
            for shared in self.share:
                grads.update(shared.reduce(grads))
            counted = [n for n in grads if self.program.home(n, dist.get_rank())]
            squares = torch.stack([
                loss.new_zeros(()),
                *(grads[n].double().square().sum() / self.parameters[n].optimizer.copies for n in counted),
            ]).sum()  # fmt: skip
            statistics = torch.stack([squares, *self._one_copy(loss, tokens)])
            assert len(statistics) == STATISTICS
            if self.world is not None:
                statistics = all_reduce(statistics, self.world)
        square, total, count = statistics.tolist()
        count = round(count)
        return (
            grads,
            total / max(count, 1),
            count,
            math.sqrt(square) / max(count, 1) if square >= 0 else math.nan,
        )

    def _tokens(self, batch: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """Unmasked labels, on ranks that have a loss."""
        found = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs in batch if self.runner.has_last else ():
            found += (inputs["labels"] != IGNORE).sum()
        return found

    def _one_copy(self, loss: Tensor, tokens: Tensor) -> list[Tensor]:
        """Addends that make the loss and the tokens of the whole batch, over all ranks."""
        return [loss / self.loss_copies, tokens / self.label_copies]

    @torch.no_grad()
    def _not_finite(self, state: TrainState, grads: Mapping[str, Tensor]) -> tuple[str, ...]:
        """The parameters that hold an inf or NaN on any rank, or else the gradients that do. Every rank calls it."""
        tables = {"": locals_of(state.parameters), "gradient of ": grads}
        places = [(what, name) for what in tables for name in self.program.parameters]
        names = [what + name for what, name in places]
        found = torch.zeros(len(names), device=self.device)
        for i, (what, name) in enumerate(places):
            if name in tables[what]:
                found[i] = ~tables[what][name].isfinite().all()
        if self.world is not None:
            found = all_reduce(found, self.world)
        broken = [name for name, ranks in zip(names, found.tolist(), strict=True) if ranks]
        parameters = [name for name in broken if name in self.program.parameters]
        return tuple(parameters or broken)

    def _leaf(self, value: Tensor, p: Parameter) -> Tensor:
        """What autograd accumulates into: aliases the value in the layout of gradients."""
        if not p.gradients.extends(p.storage):
            # Gradients are less cut than storage: no tensor of that shape exists, and .grad needs none.
            shape = p.gradients.local_shape(self.place)
            leaf = value.new_empty(()).expand(shape)
        else:
            leaf = narrow(value.detach(), p.storage, p.gradients)
        leaf.requires_grad_()
        if leaf.dtype != self.master_dtype:
            leaf.grad_dtype = self.master_dtype
        return leaf

    @torch.no_grad()
    def _apply(self, state: TrainState, grads: dict[str, Tensor], scale: float, lr: float) -> None:
        """Updates masters (or parameters themselves) in place, then parameters from them."""
        masters = {}
        for name, p in self.parameters.items():
            if "master" in state.optimizer:
                masters[name] = local(state.optimizer["master"][name])
            else:
                # torch's fused kernels walk raw memory: a block that is cut along an inner dim must be a copy.
                masters[name] = narrow(local(state.parameters[name]), p.storage, p.optimizer).contiguous()
        grads = {n: g.contiguous() for n, g in grads.items()}
        used = [n for n, g in grads.items() if g.numel()]
        if used:
            torch._foreach_mul_([grads[n] for n in used], scale)
        for decay in (True, False):
            names = [n for n in used if self.parameters[n].decay == decay]
            slots = {s: [local(state.optimizer[s][n]) for n in names] for s in self.optimizer.slots}
            group = Group(decay, [masters[n] for n in names], [grads[n] for n in names], slots)
            self.optimizer.update(group, state.step, lr)
        updated = {n: m.to(self.dtype) for n, m in masters.items()}
        for r in self.update:
            updated.update(r.gather(updated))
        for name, x in updated.items():
            parameter = local(state.parameters[name])
            if x.data_ptr() != parameter.data_ptr():
                parameter.copy_(x)

    # Evaluation

    @torch.no_grad()
    def evaluate(self, state: TrainState, batches: Iterable[Mapping[str, Tensor]]) -> float:
        """Mean loss per unmasked token over this rank's parts of all batches; the state is not changed.

        A pipeline evaluates as many batches at once as its schedule has micro-batches.
        """
        values = locals_of(state.parameters)
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        left = iter(batches)
        while batch := [*itertools.islice(left, self.runner.count)]:
            tokens = self._tokens(batch)
            spare = {**batch[-1], "labels": torch.full_like(batch[-1]["labels"], IGNORE)}
            loss = self.runner.evaluate(values, batch + [spare] * (self.runner.count - len(batch)))
            totals += torch.stack(self._one_copy(loss, tokens))
        if self.world is not None:
            totals = all_reduce(totals, self.world)
        loss, count = totals.tolist()
        if round(count) == 0:
            raise ValueError("nothing to evaluate: the batches have no unmasked label")
        return loss / round(count)


def _runner(program: Program) -> type[InOrderRunner] | type[PipelineRunner]:
    if program.pipeline is None:
        return InOrderRunner
    from dtensor_lm.schedules.run import PipelineRunner  # it loads torch's engine

    return PipelineRunner


def train_step(
    program: Program,
    optimizer: Optimizer,
    *,
    lr_schedule: Schedule | None = None,
    clip_norm: float = 0.0,
    device: str | torch.device = "auto",
) -> TrainStep:
    """The step of a Program: `state = step.init(seed)`, then `state, metrics = step(state, batch)`.

    clip_norm: largest norm of the gradient over the whole model, 0 for no clipping.
    Needs one process per rank of the mesh; a mesh of one rank needs no launcher.
    """
    if not isinstance(optimizer, (AdamW, SGD)):
        raise ConfigError(f"the optimizer is {optimizer!r}: make it with dtensor_lm.adamw(...) or dtensor_lm.sgd(...)")
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not 0 <= clip_norm < math.inf:
        raise ConfigError(f"clip_norm is {clip_norm!r}: a number of at least 0, where 0 does not clip")
    if lr_schedule is not None and not callable(lr_schedule):
        raise ConfigError(
            f"lr_schedule is {lr_schedule!r}: a function of the step, see dtensor_lm.training.learning_rate"
        )
    where = device if isinstance(device, torch.device) else process_groups.device(device)
    return TrainStep(program, optimizer, lr_schedule, clip_norm, where)
