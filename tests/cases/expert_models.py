"""Models with experts: every token goes to all of them, so nothing is dispatched and any axis may cut them."""

from __future__ import annotations

import torch
from case_models import TINY, Sum
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm.models.llama import Embedding, Head, LlamaConfig
from dtensor_lm.ops import indices
from dtensor_lm.ops.cross_entropy import IGNORE

GRADIENTS = (8.0, 6.0, 4.0, 2.0)  # their squares add up to 100 and 20, 120 in all


class FourExperts(nn.Module):
    """Each unmasked token adds 8, 6, 4 and 2 to the gradients of four experts."""

    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq", "index": "index expert"},
        outputs="+batch +seq +expert -> +batch +seq =",
        params={"weight": "expert"},
        cuts="batch seq expert",
    )

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(GRADIENTS)))

    def forward(self, tokens: Tensor, labels: Tensor, index: Tensor | None = None) -> Tensor:
        index = indices(index, len(self.weight), tokens.device)
        gradient = torch.tensor(GRADIENTS, dtype=self.weight.dtype, device=tokens.device)[index]
        return (labels != IGNORE).sum() * (gradient * self.weight).sum()


def four_experts() -> nn.Module:
    return dl.abstract(lambda: Sum(FourExperts()))


class Experts(nn.Module):
    """A mixture of feed-forward layers with biases, weighed by a router; 2-D biases inside of the sum over ffn."""

    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed", "index": "index expert"},
        outputs="batch seq embed +ffn +expert -> batch res embed",
        params={
            "router": "experts embed",  # every rank weighs all experts, whichever it holds
            "up": "expert ffn embed",
            "up_bias": "expert ffn",
            "down": "expert embed ffn",
            "down_bias": "expert embed +ffn",
        },
        cuts="batch seq ffn expert",
    )

    def __init__(self, experts: int, embed: int, ffn: int) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(experts, embed))
        self.up, self.up_bias = nn.Parameter(torch.empty(experts, ffn, embed)), nn.Parameter(torch.empty(experts, ffn))
        self.down = nn.Parameter(torch.empty(experts, embed, ffn))
        self.down_bias = nn.Parameter(torch.empty(experts, embed))

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        mine = indices(index, len(self.up), x.device)
        weights = (x @ self.router.t()).softmax(-1)[..., mine]
        hidden = (torch.einsum("bse,xfe->bsxf", x, self.up) + self.up_bias).relu()
        out = torch.einsum("bsxf,xef->bsxe", hidden, self.down) + self.down_bias
        return (weights.unsqueeze(-1) * out).sum(2)


class Mixture(nn.Module):
    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq =",
        cuts="batch seq res seq+res",
    )

    def __init__(self, experts: int, c: LlamaConfig) -> None:
        super().__init__()
        self.embed, self.experts, self.head = Embedding(c), Experts(experts, c.embed, c.ffn), Head(c)
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.experts(x), labels)


def mixture(experts: int = 4, **changes: int) -> nn.Module:
    return dl.abstract(lambda: Mixture(experts, LlamaConfig(**{**TINY, **changes})))
