"""GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020) as Megatron-LM trains them: LayerNorm before each branch,
learned positions, biases everywhere, GELU, a head tied to the table, dropout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dtensor_lm.models.vocabulary import Embedding, VocabularyLoss
from dtensor_lm.ops import Dropout, Random, causal_attention, dropout, indices
from dtensor_lm.region import Region


@dataclass(frozen=True)
class GPTConfig:
    vocab: int
    embed: int
    layers: int
    heads: int
    ffn: int = 0  # 0: 4 embed
    seq: int = 1024  # rows of the table of positions
    norm_eps: float = 1e-5
    dropout: float = 0.1  # of the embeddings and of what each branch adds
    attention_dropout: float | None = None  # of attention's weights; None: as dropout
    tied: bool = True
    init_std: float = 0.02
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def width(self) -> int:
        """Elements of one head."""
        return self.embed // self.heads

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer."""
        return self.ffn or 4 * self.embed


class AttentionCore(nn.Module):
    """Without dropout the fused kernel; with it the matrix of weights is made, since its mask has to be ours."""

    region = Region(
        inputs={
            "q": "batch seq heads head_dim -> batch q_seq core_heads head_dim",
            "k": "batch seq heads head_dim -> batch kv_seq core_heads head_dim",
            "v": "batch seq heads head_dim -> batch kv_seq core_heads head_dim",
            "random": "random batch core_heads q_seq kv_seq",
        },
        outputs="batch q_seq core_heads head_dim -> batch seq heads head_dim",
        cuts="batch core_heads",
    )

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, q: Tensor, k: Tensor, v: Tensor, random: Random | None = None) -> Tensor:
        if not self.p or not self.training:
            return causal_attention(q, k, v, 1)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        kept = scores if scores.dtype == torch.float64 else scores.float()
        weights = kept.masked_fill(future, -math.inf).softmax(-1).to(v.dtype)
        return torch.einsum("bhqk,bkhd->bqhd", dropout(weights, self.p, random), v)


class Attention(nn.Module):
    region = Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +heads -> batch res embed",
        params={
            **dict.fromkeys(("wq.weight", "wk.weight", "wv.weight"), "(heads head_dim) embed"),
            **dict.fromkeys(("wq.bias", "wk.bias", "wv.bias"), "(heads head_dim)"),
            "wo.weight": "embed (heads head_dim)",
            "wo.bias": "embed +heads",
        },
        cuts="batch seq heads",
    )

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.head_dim = c.width
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(c.embed, c.embed) for _ in range(4))
        self.core = AttentionCore(c.dropout if c.attention_dropout is None else c.attention_dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(w(x), "b s (h d) -> b s h d", d=self.head_dim) for w in (self.wq, self.wk, self.wv))
        return self.wo(rearrange(self.core(q, k, v), "b s h d -> b s (h d)"))


class MLP(nn.Module):
    region = Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +ffn -> batch res embed",
        params={"up.weight": "ffn embed", "up.bias": "ffn", "down.weight": "embed ffn", "down.bias": "embed +ffn"},
        cuts="batch seq ffn",
    )

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(c.embed, c.hidden), nn.Linear(c.hidden, c.embed)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    region = Region(
        inputs={"x": "batch res embed"},
        outputs="batch res embed",
        params=dict.fromkeys(
            ("attention_norm.weight", "attention_norm.bias", "mlp_norm.weight", "mlp_norm.bias"), "embed"
        ),
        cuts="batch res",
    )

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.LayerNorm(c.embed, eps=c.norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(c), MLP(c)
        self.attention_drop, self.mlp_drop = (Dropout(c.dropout, "batch res embed") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_drop(self.attention(self.attention_norm(x)))
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x)))


class Positions(nn.Module):
    """Adds each position's row of a table."""

    region = Region(
        inputs={"x": "batch res embed", "index": "index res"},
        outputs="batch res embed",
        params={"weight": "position embed"},
        cuts="batch res embed",
    )

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.seq, c.embed))

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        if x.shape[1] > len(self.weight):
            raise ValueError(f"a sequence of {x.shape[1]}, but the table has {len(self.weight)} positions (seq)")
        return x + F.embedding(indices(index, x.shape[1], x.device), self.weight)


class Head(nn.Module):
    region = Region(
        inputs={"x": "batch res embed", "labels": "int batch seq"},
        outputs="+batch +seq =",
        params={"norm.weight": "embed", "norm.bias": "embed"},
        cuts="batch seq res seq+res",
    )

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c.embed, eps=c.norm_eps)
        self.loss = VocabularyLoss(c)

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        return self.loss(self.norm(x), labels)


class GPT(nn.Module):
    """tokens, labels (batch, seq) int64 -> the sum of the loss over unmasked labels; without labels the logits."""

    region = Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq =",
        cuts="batch seq res seq+res",
    )

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.config = c
        self.embed = Embedding(c)
        self.positions = Positions(c)
        self.drop = Dropout(c.dropout, "batch res embed")
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.head = Head(c)
        if c.tied:
            self.head.loss.weight = self.embed.weight
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Initial values: normal, those that end a residual branch smaller by sqrt(2 layers); norms 1, biases 0."""
        c = self.config
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.ndim == 1:
                nn.init.ones_(p)
            else:
                ends_branch = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(p, std=c.init_std / (math.sqrt(2 * c.layers) if ends_branch else 1))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.drop(self.positions(self.embed(tokens)))
        for block in self.layers:
            x = block(x)
        return self.head(x, labels)
