"""The two ends of a language model: the table of tokens, and logits with their loss."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor_lm.ops import Parts, cross_entropy, embedding
from dtensor_lm.region import Region


class Ends(Protocol):
    """What a model's config says of its ends."""

    @property
    def vocab(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def label_smoothing(self) -> float: ...
    @property
    def z_loss(self) -> float: ...


class Embedding(nn.Module):
    region = Region(
        inputs={"ids": "int batch seq", "index": "index vocab"},
        outputs="batch seq embed +vocab -> batch res embed",
        params={"weight": "vocab embed"},
        cuts="batch seq vocab",
    )

    def __init__(self, c: Ends) -> None:
        super().__init__()
        self.vocab = c.vocab
        self.weight = nn.Parameter(torch.empty(c.vocab, c.embed))

    def forward(self, ids: Tensor, index: Tensor | None = None) -> Tensor:
        return embedding(ids, self.weight, self.vocab, index)


class VocabularyLoss(nn.Module):
    """Logits and their loss in one region, so that logits are never whole."""

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

    def __init__(self, c: Ends) -> None:
        super().__init__()
        self.config = c
        self.weight = nn.Parameter(torch.empty(c.vocab, c.embed))

    def forward(
        self, x: Tensor, labels: Tensor | None, index: Tensor | None = None, parts: Parts | None = None
    ) -> Tensor:
        logits = F.linear(x, self.weight)
        if labels is None:
            return logits
        c = self.config
        smoothing, z = (c.label_smoothing, c.z_loss) if self.training else (0.0, 0.0)
        return cross_entropy(logits, labels, c.vocab, index, parts, smoothing, z)
