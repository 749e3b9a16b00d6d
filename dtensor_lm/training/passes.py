"""All forwards and backwards of a step without a pipeline: one micro-batch after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dtensor_lm.ops.dropout import Moment
from dtensor_lm.partition import partition
from dtensor_lm.sharding_plans.program import Program

Inputs = Mapping[str, Tensor]


class InOrderRunner:
    """A Program on this rank. model: of the Program; seed: what backward of a loss begins with.

    It does what `dtensor_lm.schedules.run.PipelineRunner` does for a Program with a pipeline.
    """

    count = 1  # micro-batches of an evaluation
    has_last = True  # whether this rank has the loss

    def __init__(self, program: Program, model: nn.Module, device: torch.device, seed: Tensor) -> None:
        self.module = partition(program, model, device)
        self.rows = program.batch // program.micro_batches
        self.device, self.seed = device, seed

    def train(self, leaves: Mapping[str, Tensor], values: Mapping[str, Tensor], moment: Moment,
              batch: Sequence[Inputs]) -> Tensor:  # fmt: skip
        """Fills the gradients of `leaves`; returns the sum of the losses."""
        self.module.train()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, inputs in enumerate(batch):
            out = self.module(leaves, values, replace(moment, row=i * self.rows), **inputs)
            out.backward(self.seed.to(out.dtype))
            loss += out.detach()
        self.module.release()
        return loss

    @torch.no_grad()
    def evaluate(self, values: Mapping[str, Tensor], batch: Sequence[Inputs]) -> Tensor:
        """The sum of the losses of `count` micro-batches."""
        self.module.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs in batch:
            loss += self.module(values, values, **inputs)
        self.module.train()
        self.module.release()
        return loss
