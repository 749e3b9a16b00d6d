"""A small model of its own for tests of the step: a table, a feed-forward layer with biases, and a loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm.ops import embedding


class Table(nn.Module):
    region = dl.Region(
        inputs={"ids": "int batch seq", "index": "index vocab"},
        outputs="batch seq embed +vocab -> batch res embed",
        params={"weight": "vocab embed"},
        cuts="batch seq vocab",
    )

    def __init__(self, vocab: int, embed: int) -> None:
        super().__init__()
        self.vocab, self.weight = vocab, nn.Parameter(torch.randn(vocab, embed))

    def forward(self, ids: Tensor, index: Tensor | None = None) -> Tensor:
        return embedding(ids, self.weight, self.vocab, index)


class MLP(nn.Module):
    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +ffn -> batch res embed",
        params={"up.weight": "ffn embed", "up.bias": "ffn", "down.weight": "embed ffn", "down.bias": "embed +ffn"},
        cuts="batch seq ffn",
    )

    def __init__(self, embed: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(embed, ffn), nn.Linear(ffn, embed)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Loss(nn.Module):
    """A loss without a vocabulary; its output says nothing about other axes, so they are in state R."""

    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed", "labels": "int batch seq"},
        outputs="+batch +seq",
        cuts="batch seq",
    )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return ((x.square().sum(-1) - 1) * (labels != -100)).square().sum()


class Small(nn.Module):
    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq",
        cuts="batch seq res seq+res",
    )

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp, self.loss = Table(12, 8), MLP(8, 16), Loss()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.mlp(self.table(tokens)), labels)
