"""Cross-entropy over a vocabulary that may be cut: logits are never whole on one rank."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from dtensor_lm.ops.embedding import check_ids
from dtensor_lm.ops.parts import Parts, Whole
from dtensor_lm.region import Region

IGNORE = -100


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab: int,
    index: Tensor | None = None,
    parts: Parts | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The sum over tokens of the cross-entropy, a scalar in at least float32.

    logits: (batch, seq, vocab or its part); labels: (batch, seq) int64, -100 is masked; vocab: the whole size;
    index: (part,) global ids of the columns; parts: sums and maxima over the other parts.
    label_smoothing mixes the target with the uniform distribution (Szegedy et al., 2016); z_loss adds
    z_loss * logsumexp(logits)^2 per token (Chowdhery et al., 2022).
    Raises IndexError for a label outside the vocabulary.
    """
    check_ids(labels.where(labels != IGNORE, 0), vocab, "label")
    start = torch.zeros((), dtype=torch.int64, device=labels.device) if index is None else index[0]
    loss = _CrossEntropy.apply(logits, labels, vocab, start, parts or Whole(), label_smoothing, z_loss)
    assert isinstance(loss, Tensor)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        labels: Tensor,
        vocab: int,
        start: Tensor,
        parts: Parts,
        smoothing: float,
        z: float,
    ) -> Tensor:
        x = logits if logits.dtype == torch.float64 else logits.float()
        largest = parts.max(x.amax(-1), "batch seq")
        x = x - largest.unsqueeze(-1)  # a new tensor, also where `logits` was float already
        local = labels - start
        mine = (local >= 0) & (local < x.shape[-1])
        local = local.where(mine, 0)
        target = x.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(mine, 0)
        mean = [x.sum(-1) / vocab] if smoothing else []
        exp = x.exp_()
        sums = parts.sum(torch.stack([exp.sum(-1), target, *mean]), "_ batch seq")
        kept = (labels != IGNORE).to(x.dtype)
        log = sums[0].log()
        loss = log - (1 - smoothing) * sums[1]
        if smoothing:
            loss = loss - smoothing * sums[2]
        lse = log + largest
        if z:
            loss = loss + z * lse.square()
        ctx.save_for_backward(exp, sums[0], lse, local, mine, kept)
        ctx.constants = (vocab, smoothing, z, logits.dtype)  # type: ignore[attr-defined]
        return (loss * kept).sum()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exp, total, lse, local, mine, kept = ctx.saved_tensors  # type: ignore[attr-defined]
        vocab, smoothing, z, dtype = ctx.constants  # type: ignore[attr-defined]
        scale = kept * grads[0]
        factor = scale / total
        if z:
            factor = factor * (1 + 2 * z * lse)
        grad = exp * factor.unsqueeze(-1)
        if smoothing:
            grad -= (smoothing / vocab) * scale.unsqueeze(-1)
        hit = -(1 - smoothing) * scale * mine.to(grad.dtype)
        grad.scatter_add_(-1, local.unsqueeze(-1), hit.unsqueeze(-1))
        return grad.to(dtype), None, None, None, None, None, None


class VocabularyLoss(nn.Module):
    """`nn.Linear(embed, vocab, bias=False)` and its cross-entropy in one region, so that logits are never whole.

    x (batch, seq, embed), labels (batch, seq) int64 with -100 masked -> the sum of the loss over tokens, a scalar;
    without labels the logits. Smoothing and z-loss, as in `cross_entropy`, are of training only.
    """

    region = Region(
        inputs={
            "x": "batch res embed -> batch seq embed",
            "labels": "int batch seq",
            "index": "index vocab",
            "parts": "reduce vocab",
        },
        outputs="+batch +seq =",
        params={"weight": "vocab embed"},
        cuts="batch seq vocab",
    )

    def __init__(self, vocab: int, embed: int, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        super().__init__()
        self.vocab, self.label_smoothing, self.z_loss = vocab, label_smoothing, z_loss
        self.weight = nn.Parameter(torch.empty(vocab, embed))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear

    def forward(
        self, x: Tensor, labels: Tensor | None = None, index: Tensor | None = None, parts: Parts | None = None
    ) -> Tensor:
        logits = F.linear(x, self.weight)
        if labels is None:
            return logits
        smoothing, z = (self.label_smoothing, self.z_loss) if self.training else (0.0, 0.0)
        return cross_entropy(logits, labels, self.vocab, index, parts, smoothing, z)
