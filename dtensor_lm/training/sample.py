"""Text from a trained model, on one device: what a person looks at first."""

from __future__ import annotations

import inspect
import math

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_lm.config import SampleConfig
from dtensor_lm.data import Corpus
from dtensor_lm.models.single import single_device
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.state import TrainState, whole

MOST_PARAMETERS = 500_000_000  # larger models are not gathered on one rank for the sake of a sample


def no_sample(program: Program) -> str:
    """Why a model gives no text, or ''."""
    if sum(math.prod(p.storage.shape) for p in program.parameters.values()) > MOST_PARAMETERS:
        return "the model is too large to be gathered on one rank"
    labels = inspect.signature(program.model.forward).parameters["labels"]
    return "the model needs labels, and gives no logits without them" if labels.default is labels.empty else ""


def whole_on_first(program: Program, state: TrainState) -> dict[str, Tensor]:
    """All whole parameters on rank 0, some or none on others; every rank calls it."""
    mine = whole(state.parameters)
    if program.pipeline is None:
        return mine
    # Each pipeline rank has those of its stages, and one of its ranks sends them.
    inner, rank = program.mesh.without(program.pipeline.axis), dist.get_rank()
    sent = {n: x.cpu() for n, x in mine.items()} if rank == min(inner.group(inner.active, rank)) else {}
    every: list[dict[str, Tensor]] = [{}] * dist.get_world_size() if rank == 0 else []
    dist.gather_object(sent, every or None)
    return {name: x for part in every for name, x in part.items()}


@torch.no_grad()
def sample(
    program: Program, state: TrainState, corpus: Corpus, config: SampleConfig, seed: int, device: torch.device
) -> str | None:
    """Continues `config.prompt`, on rank 0; None on the others, without tokens, and where `no_sample` says why.

    Every rank calls it: parameters are gathered.
    """
    if not config.tokens or no_sample(program):
        return None
    values = whole_on_first(program, state)
    if dist.get_rank() != 0:
        return None
    model = single_device(program.model, values, device).eval()
    generator = torch.Generator(device=device).manual_seed(seed)
    text = list(config.prompt.encode(errors="replace")) or [0]
    for _ in range(config.tokens):
        window = torch.tensor([text[-program.seq :]], device=device)
        logits = model(window)[0, -1].float()
        if config.temperature == 0:
            text.append(int(logits.argmax()))
        else:
            odds = (logits / config.temperature).softmax(-1)
            text.append(int(torch.multinomial(odds, 1, generator=generator)))
    return corpus.decode(text)
