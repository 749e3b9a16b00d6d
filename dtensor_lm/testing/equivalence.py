"""A sharded run against one device: loss, every gradient, the norm, parameters after steps, collectives and bytes.

The reference is plain PyTorch: the unpartitioned model, `torch.autograd.grad`, `torch.nn.utils.clip_grad_norm_` and
torch's own optimizers. It shares no code with the runtime but the model's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtensor_lm.initial_values import draw, recipes
from dtensor_lm.models.single import drawing, single_device
from dtensor_lm.ops.cross_entropy import IGNORE
from dtensor_lm.ops.dropout import Moment
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.state import TrainState, locals_of, take, whole
from dtensor_lm.testing import precision
from dtensor_lm.testing.assemble import Whole, assemble, from_first, on_cpu, to_first
from dtensor_lm.testing.counting import CountCollectives, differences, predicted
from dtensor_lm.training.optimizer import SGD, AdamW
from dtensor_lm.training.step import Batch, TrainStep, train_step


@dataclass
class Report:
    """Errors are relative: of the loss and the norm to themselves, of a tensor to its largest element.

    In float32 and bfloat16 they are distances to float64 by the 2-norm, and `bounds` says what is allowed
    (`dtensor_lm.testing.precision`); parameters after AdamW are then not compared with one device (None).
    """

    loss_error: float = 0.0
    max_grad_error: float = 0.0
    worst_gradient: str = ""
    grad_norm_error: float = 0.0
    max_param_error: float | None = 0.0  # None where nothing was trained
    worst_parameter: str = ""
    max_param_error_adamw: float | None = 0.0
    initial_values_equal: bool = True
    replicas_equal: bool = True
    collectives_match: bool = True
    mismatches: list[str] = field(default_factory=list)
    collectives: int = 0  # of a step, on the rank with the most
    bytes: int = 0
    tolerance: float = 1e-10
    bounds: dict[str, float] = field(default_factory=dict)  # where they are not the tolerance

    @property
    def ok(self) -> bool:
        errors = ("loss_error", "max_grad_error", "grad_norm_error", "max_param_error", "max_param_error_adamw")
        flags = (self.initial_values_equal, self.replicas_equal, self.collectives_match)
        found = {name: error for name in errors if (error := getattr(self, name)) is not None}
        within = [error <= self.bounds.get(name, self.tolerance) for name, error in found.items()]
        return all(within) and all(flags)  # NaN is not <= anything

    def as_dict(self) -> dict[str, object]:
        return {"ok": self.ok, **self.__dict__}


@dataclass(frozen=True)
class _Traffic:
    """What one rank counted in a step."""

    mismatches: list[str]
    collectives: int
    bytes: int


def random_batch(program: Program, seed: int) -> dict[str, Tensor]:
    """Whole integer inputs of one step, the same on every rank: random tokens, labels masked in several patterns."""
    g = torch.Generator().manual_seed(seed)
    vocab = program.sizes["vocab"]
    shape = (program.batch, program.seq)
    tokens, labels = (torch.randint(0, vocab, shape, generator=g) for _ in range(2))
    labels[torch.rand(shape, generator=g) < 0.1] = IGNORE
    if program.batch > 1:
        labels[0] = IGNORE  # a row, and with one row per rank a whole rank or micro-batch, without a single label
    labels[-1, program.seq // 2 :] = IGNORE
    return {"tokens": tokens, "labels": labels}


def parts(program: Program, inputs: Mapping[str, Tensor], device: torch.device) -> Batch:
    """This rank's part of a whole batch, as micro-batches."""
    rows = program.batch // program.micro_batches
    return [
        {n: take(x[m * rows : (m + 1) * rows], program.inputs[n]).to(device) for n, x in inputs.items()}
        for m in range(program.micro_batches)
    ]


class Reference:
    """The model on one device, in plain PyTorch."""

    def __init__(self, program: Program, values: Whole, seed: int = 0, dtype: torch.dtype | None = None) -> None:
        model = program.model if dtype is None else copy.deepcopy(program.model).to(dtype)
        self.model, self.seed = single_device(model, values), seed
        self.decay = {name: p.decay for name, p in program.parameters.items()}
        self.model.train()

    def at(self, step: int) -> AbstractContextManager[None]:
        """Within it the model draws what a mesh draws at this step; backward may draw again."""
        return drawing(self.model, Moment.of(self.seed, step))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean loss per unmasked token."""
        return self.model(**batch) / max(int((batch["labels"] != IGNORE).sum()), 1)

    def gradients(self, batch: Mapping[str, Tensor]) -> tuple[float, Whole, float]:
        """The loss at step 0, its gradients, their norm."""
        names = dict(self.model.named_parameters())
        with self.at(0):
            loss = self.loss(batch)
            grads = torch.autograd.grad(loss, list(names.values()), allow_unused=True, materialize_grads=True)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        return float(loss.detach()), dict(zip(names, grads, strict=True)), norm

    def train(self, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]], clip_norm: float) -> Whole:
        for step, batch in enumerate(batches):
            optimizer.zero_grad()
            for p in self.model.parameters():
                p.grad = torch.zeros_like(p)  # torch's optimizers pass over unused parameters; ours decay them
            with self.at(step):
                self.loss(batch).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
            optimizer.step()
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def train_masters(self, o: SGD, masters: Whole, batches: list[dict[str, Tensor]], clip_norm: float) -> Whole:
        """The masters after steps of SGD in which the model computes in its own dtype."""
        kept = {n: nn.Parameter(v.clone()) for n, v in masters.items()}
        optimizer = torch.optim.SGD(self._groups(o.weight_decay, kept), lr=o.lr, momentum=o.momentum)
        named = dict(self.model.named_parameters())
        for step, batch in enumerate(batches):
            with self.at(step):
                grads = torch.autograd.grad(self.loss(batch), list(named.values()), materialize_grads=True)
            for master, g in zip((kept[n] for n in named), grads, strict=True):
                master.grad = g.to(master.dtype)
            nn.utils.clip_grad_norm_(kept.values(), clip_norm)
            optimizer.step()
            with torch.no_grad():
                for n, p in named.items():
                    p.copy_(kept[n])
        return {n: p.detach() for n, p in kept.items()}

    def sgd(self, o: SGD) -> torch.optim.Optimizer:
        return torch.optim.SGD(self._groups(o.weight_decay), lr=o.lr, momentum=o.momentum)

    def adamw(self, o: AdamW) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._groups(o.weight_decay), lr=o.lr, betas=o.betas, eps=o.eps)

    def _groups(self, decay: float, named: Mapping[str, nn.Parameter] | None = None) -> list[dict[str, object]]:
        named = named or dict(self.model.named_parameters())
        return [
            {"params": [p for n, p in named.items() if self.decay[n]], "weight_decay": decay},
            {"params": [p for n, p in named.items() if not self.decay[n]], "weight_decay": 0.0},
        ]


def relative(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest element expected (at least `floor`); NaN stays NaN."""
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), floor) or 1.0
    return float((found.double() - expected.double()).abs().max()) / scale


def worst(found: Whole, expected: Whole) -> tuple[float, str]:
    floor = 1e-3 * max((float(e.abs().max()) for e in expected.values() if e.numel()), default=1.0)
    errors = {name: relative(found[name], e, floor) for name, e in expected.items()}
    name = max(errors, key=lambda n: math.inf if math.isnan(errors[n]) else errors[n])
    return errors[name], name


def compare(
    program: Program,
    *,
    seed: int = 0,
    steps: int = 3,
    tolerance: float = 1e-10,
    device: str = "cpu",
    values: Whole | None = None,
    batches: list[dict[str, Tensor]] | None = None,
) -> Report:
    """Runs a Program on this process group against one device on rank 0; every rank returns rank 0's report.

    Parameters are the initial values with noise added, so that no zeros or ones of initialisers hide a fault. Clipping
    is active. With 0 steps nothing is trained: loss, gradients, norm and collectives of one step alone.
    tolerance: in float64; other dtypes are held to the bounds of `dtensor_lm.testing.precision`.
    `values` and `batches` are whole tensors, when the caller brings its own.
    """
    sgd = SGD(lr=0.1, momentum=0.9, weight_decay=0.01)
    step = train_step(program, sgd, clip_norm=1e-30, device=device)
    known = recipes(program.model)
    dtype = getattr(torch, program.master_dtype)
    shapes = {n: p.storage.shape for n, p in program.parameters.items()}
    initial = {n: draw(known[n], n, seed, shape, [(0, s) for s in shape], dtype) for n, shape in shapes.items()}
    blocks = {"initial": _copies(step.init(seed).parameters)}
    if values is None:
        g = torch.Generator().manual_seed(seed + 1)
        values = {n: v + 0.05 * torch.randn(v.shape, generator=g, dtype=torch.float64).to(dtype)
                  for n, v in initial.items()}  # fmt: skip
    exact = program.dtype == "float64"
    values = values if exact else precision.rounded(values, program.dtype)
    batches = batches or [random_batch(program, seed + i) for i in range(max(steps, 1))]

    count = CountCollectives(program.mesh)
    with count:
        grads, loss, _, norm = step.gradients(step.load(values, seed=seed), parts(program, batches[0], step.device))
        # The rest of the step, on copies that are thrown away: only its collectives are of interest here.
        step._apply(step.load(values), {n: g.clone() for n, g in grads.items()}, 1.0, 0.0)
    blocks["gradients"] = grads
    mine = _Traffic(
        differences(predicted(step.local.collectives), count.counts),
        sum(count.counts.values()),
        sum(size * n for (_, _, _, size), n in count.counts.items()),
    )
    clip = 0.5 * norm or 1.0
    adamw = AdamW(lr=1e-3, weight_decay=0.1)
    if steps:
        state = _train(step, step.load(values, seed=seed), batches[:steps], clip)
        blocks["sgd"] = _copies(state.parameters)
        if "master" in state.optimizer:
            blocks["masters"] = _copies(state.optimizer["master"])
        second = train_step(program, adamw, device=device)
        blocks["adamw"] = _copies(_train(second, second.load(values, seed=seed), batches[:steps], clip).parameters)

    report = Report(tolerance=tolerance)
    gathered = to_first((on_cpu(blocks), mine))
    if gathered:
        every, traffic = [blocks for blocks, _ in gathered], [traffic for _, traffic in gathered]
        report.mismatches = list(dict.fromkeys(line for each in traffic for line in each.mismatches))
        report.collectives_match = not report.mismatches
        report.collectives, report.bytes = (max(getattr(t, name) for t in traffic) for name in ("collectives", "bytes"))
        tables = {n: p.storage for n, p in program.parameters.items()}
        layouts = {kind: tables for kind in blocks}
        layouts["gradients"] = layouts["masters"] = {n: p.optimizer for n, p in program.parameters.items()}
        wholes: dict[str, Whole] = {}
        for kind in blocks:
            wholes[kind], apart = assemble([of_rank[kind] for of_rank in every], layouts[kind])
            report.mismatches += [f"{kind}: copies of {n} differ between ranks" for n in apart]
            report.replicas_equal &= not apart
        report.initial_values_equal = all(torch.equal(x, initial[n].to(x.dtype)) for n, x in wholes["initial"].items())
        tokens = max(int((batches[0]["labels"] != IGNORE).sum()), 1)
        found = (loss, {n: g / tokens for n, g in wholes["gradients"].items()}, norm)
        reference = Reference(program, values, seed, torch.float64)
        if exact:
            _judge(report, found, reference.gradients(batches[0]))
        else:
            low = Reference(program, values, seed)
            largest = precision.judge_gradients(report, program, found, batches[0], reference, low)
            report.max_param_error_adamw = None
        if not steps:
            report.max_param_error = report.max_param_error_adamw = None
        else:
            trained = reference.train(reference.sgd(sgd), batches[:steps], clip)
            if exact:
                report.max_param_error, report.worst_parameter = worst(wholes["sgd"], trained)
                reference = Reference(program, values, seed)
                trained = reference.train(reference.adamw(adamw), batches[:steps], clip)
                report.max_param_error_adamw, _ = worst(wholes["adamw"], trained)
            else:
                masters = wholes.get("masters", wholes["sgd"])
                report.mismatches += [f"sgd: {n} is not its master, rounded" for n, x in wholes["sgd"].items()
                                      if not torch.equal(x, masters[n].to(x.dtype))]  # fmt: skip
                report.replicas_equal &= not any("its master" in line for line in report.mismatches)
                one = low.train_masters(sgd, values, batches[:steps], clip)
                precision.judge_parameters(report, program, (masters, trained, one, values), largest, steps)
    return from_first(report)


def _judge(report: Report, found: tuple[float, Whole, float], expected: tuple[float, Whole, float]) -> None:
    """In float64: loss, gradients and norm."""
    report.loss_error = abs(found[0] - expected[0]) / (abs(expected[0]) or 1.0)
    report.max_grad_error, report.worst_gradient = worst(found[1], expected[1])
    report.grad_norm_error = abs(found[2] - expected[2]) / (expected[2] or 1.0)


def _copies(tensors: Mapping[str, DTensor]) -> Whole:
    """This rank's blocks, as they are now."""
    return {name: x.detach().clone() for name, x in locals_of(tensors).items()}


def _train(step: TrainStep, state: TrainState, batches: list[dict[str, Tensor]], clip: float) -> TrainState:
    step.clip_norm = clip
    for batch in batches:
        state, _ = step(state, parts(step.program, batch, step.device))
    return state


def gathered(tensors: Mapping[str, DTensor]) -> Whole:
    """Whole tensors, on every rank."""
    return {name: t.cpu() for name, t in whole(tensors).items()}
