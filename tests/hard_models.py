"""A transformer out of what makes gradients go wrong under parallelism, each part a switch: attention sinks, norms of q
and k, kv heads of their own, a scale that two regions share, biases inside of sums, a router with a z-loss whose value
two regions use, a learned scale of the logits, a table that is tied."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dtensor_lm as dl
from dtensor_lm.models.vocabulary import Embedding
from dtensor_lm.ops import Dropout, Parts, cross_entropy


@dataclass(frozen=True)
class Hard:
    vocab: int = 24
    embed: int = 8
    heads: int = 4
    group: int = 2
    ffn: int = 12
    experts: int = 0  # 0: one feed-forward layer without a router
    layers: int = 1
    seq: int = 24
    sinks: bool = False
    qk_norm: bool = False
    shared_scale: bool = False
    biases: bool = False
    logit_scale: bool = False
    tied: bool = False
    dropout: float = 0.0
    head_dim: int = 2


class Core(nn.Module):
    """Attention in plain operators; a sink is a learned logit per head that takes weight and gives no value."""

    region = dl.Region(
        inputs={
            "q": "batch seq kv_heads group head_dim -> batch q_seq core_heads group head_dim",
            "k": "batch seq kv_heads head_dim -> batch kv_seq core_heads head_dim",
            "v": "batch seq kv_heads head_dim -> batch kv_seq core_heads head_dim",
            "index": "index q_seq",
        },
        outputs="batch q_seq core_heads group head_dim -> batch seq kv_heads group head_dim",
        params={"sinks": "core_heads group"},
        cuts="batch q_seq core_heads group",
    )

    def __init__(self, c: Hard) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.empty(c.heads // c.group, c.group))
        self.used = c.sinks

    def forward(self, q: Tensor, k: Tensor, v: Tensor, index: Tensor | None = None) -> Tensor:
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) / math.sqrt(q.shape[-1])
        rows = torch.arange(q.shape[1], device=q.device) if index is None else index
        future = torch.arange(k.shape[1], device=q.device) > rows.unsqueeze(-1)
        scores = scores.masked_fill(future, -math.inf)
        sink = self.sinks[..., None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink if self.used else sink - math.inf], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhgqk,bkhd->bqhgd", weights, v)


class Attention(nn.Module):
    """Weights with a dim for heads and one for those of their group; biases of q, and of the output inside its sum."""

    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +kv_heads +group -> batch res embed",
        params={
            **dict.fromkeys(("wq", "wo"), "kv_heads group head_dim embed"),
            **dict.fromkeys(("wk", "wv"), "kv_heads head_dim embed"),
            "q_bias": "kv_heads group head_dim",
            "q_norm": "head_dim",
            "k_norm": "head_dim",
            "scale": "embed",
            "wo_bias": "embed +kv_heads +group",
        },
        cuts="batch seq kv_heads group",
    )

    def __init__(self, c: Hard) -> None:
        super().__init__()
        kv = c.heads // c.group
        self.c = c
        self.wq, self.wo = (nn.Parameter(torch.empty(kv, c.group, c.head_dim, c.embed)) for _ in range(2))
        self.wk, self.wv = (nn.Parameter(torch.empty(kv, c.head_dim, c.embed)) for _ in range(2))
        self.q_bias = nn.Parameter(torch.empty(kv, c.group, c.head_dim))
        self.q_norm, self.k_norm = (nn.Parameter(torch.empty(c.head_dim)) for _ in range(2))
        self.scale, self.wo_bias = (nn.Parameter(torch.empty(c.embed)) for _ in range(2))
        self.core = Core(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        q = torch.einsum("bse,hgde->bshgd", x, self.wq) + self.q_bias
        k, v = (torch.einsum("bse,hde->bshd", x, w) for w in (self.wk, self.wv))
        if self.c.qk_norm:
            q = F.rms_norm(q, self.q_norm.shape, self.q_norm, 1e-5)
            k = F.rms_norm(k, self.k_norm.shape, self.k_norm, 1e-5)
        out = torch.einsum("bshgd,hgde->bse", self.core(q, k, v), self.wo)
        return out + self.wo_bias if self.c.biases else out


class Router(nn.Module):
    """Weights of experts per token, and the z-loss (Zoph et al. 2022) as a sum over tokens."""

    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs=("batch seq expert -> batch seq expert", "+batch +seq ="),
        params={"weight": "expert embed"},
        cuts="batch seq",
    )

    def __init__(self, c: Hard) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max(c.experts, 1), c.embed))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        return logits.softmax(-1), 0.1 * logits.logsumexp(-1).square().sum()


class Experts(nn.Module):
    """All experts on all tokens, added with the router's weights."""

    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed", "gates": "batch seq expert"},
        outputs="batch seq embed +expert +ffn -> batch res embed",
        params={"up": "expert ffn embed", "up_bias": "expert ffn", "down": "expert embed ffn", "scale": "embed",
                "down_bias": "embed +expert +ffn"},
        cuts="batch seq expert ffn",
    )  # fmt: skip

    def __init__(self, c: Hard) -> None:
        super().__init__()
        n = max(c.experts, 1)
        self.up, self.down = nn.Parameter(torch.empty(n, c.ffn, c.embed)), nn.Parameter(torch.empty(n, c.embed, c.ffn))
        self.up_bias, self.down_bias = nn.Parameter(torch.empty(n, c.ffn)), nn.Parameter(torch.empty(c.embed))
        self.scale = nn.Parameter(torch.empty(c.embed))

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("bse,nfe->bsnf", x * self.scale, self.up) + self.up_bias)
        return torch.einsum("bsnf,nef,bsn->bse", hidden, self.down, gates) + self.down_bias


class Block(nn.Module):
    region = dl.Region(
        inputs={"x": "batch res embed"},
        outputs=("batch res embed", "+batch +seq ="),
        params={"norm.weight": "embed", "norm.bias": "embed"},
        cuts="batch seq res seq+res",
    )

    def __init__(self, c: Hard) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c.embed)
        self.attention, self.router, self.experts = Attention(c), Router(c), Experts(c)
        self.drop = Dropout(c.dropout, "batch res embed")
        if c.shared_scale:
            self.experts.scale = self.attention.scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.drop(self.attention(self.norm(x)))
        gates, z = self.router(x)
        return x + self.experts(x, gates), z


class Head(nn.Module):
    """The weight may be the table, and then the axes of this region reduce the gradients of both uses."""

    region = dl.Region(
        inputs={
            "x": "batch res embed -> batch seq embed",
            "labels": "int batch seq",
            "index": "index vocab",
            "parts": "reduce vocab",
        },
        outputs="+batch +seq =",
        params={"weight": "vocab embed", "scale": ""},
        cuts="batch seq vocab",
    )

    def __init__(self, c: Hard) -> None:
        super().__init__()
        self.c = c
        self.weight, self.scale = nn.Parameter(torch.empty(c.vocab, c.embed)), nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor, labels: Tensor, index: Tensor | None = None, parts: Parts | None = None) -> Tensor:
        scale = self.scale if self.c.logit_scale else 1.0
        return cross_entropy(F.linear(x, self.weight) * scale, labels, self.c.vocab, index, parts)


class HardModel(nn.Module):
    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq =",
        cuts="batch seq res seq+res",
    )

    def __init__(self, c: Hard) -> None:
        super().__init__()
        self.config = c
        self.embed, self.layers, self.head = Embedding(c), nn.ModuleList(Block(c) for _ in range(c.layers)), Head(c)
        if c.tied:
            self.head.weight = self.embed.weight
        for p in self.parameters():
            nn.init.normal_(p, mean=1.0 if p.ndim == 0 else 0.0, std=0.5)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, extra = self.embed(tokens), 0.0
        for block in self.layers:
            x, z = block(x)
            extra = extra + z
        return self.head(x, labels) + extra


def build(**changes: object) -> nn.Module:
    return dl.abstract(lambda: HardModel(Hard(**changes)))
