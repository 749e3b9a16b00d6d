"""The Llama family (Touvron et al. 2023; Llama 3, Dubey et al. 2024) as single-device PyTorch, with names beside it.

Nothing here knows about parallelism: a `Region` says what the dims are called, and everything else follows from
the plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dtensor_lm.models.vocabulary import Embedding, VocabularyLoss
from dtensor_lm.ops import causal_attention, indices
from dtensor_lm.region import Region


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of low rotary frequencies to longer contexts."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    vocab: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int = 8192  # the longest sequence it is made for
    head_dim: int = 0  # 0: embed // heads
    rope_base: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied: bool = False
    init_std: float = 0.02
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    @property
    def width(self) -> int:
        """Elements of one head."""
        return self.head_dim or self.embed // self.heads


def rope(x: Tensor, positions: Tensor, base: float, scaling: RopeScaling | None) -> Tensor:
    """Rotary positions (Su et al. 2021), rotate-half form. x: (batch, seq, heads, head_dim); positions: (seq,)."""
    half = x.shape[-1] // 2
    freq = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    if scaling is not None:
        turns = scaling.original_seq * freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = freq * (keep + (1 - keep) / scaling.factor)
    angle = torch.outer(positions.double(), freq).unsqueeze(1)  # (seq, 1, half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class AttentionCore(nn.Module):
    region = Region(
        inputs={
            "q": "batch seq heads head_dim -> batch q_seq core_heads head_dim",
            "k": "batch seq kv_heads head_dim -> batch kv_seq core_kv_heads head_dim",
            "v": "batch seq kv_heads head_dim -> batch kv_seq core_kv_heads head_dim",
            "head_index": "index core_heads",
            "kv_index": "index core_kv_heads",
        },
        outputs="batch q_seq core_heads head_dim -> batch seq heads head_dim",
        cuts="batch core_heads core_heads+core_kv_heads",
    )

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group  # query heads per key-value head

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        head_index: Tensor | None = None,
        kv_index: Tensor | None = None,
    ) -> Tensor:
        return causal_attention(q, k, v, self.group, head_index, kv_index)


class Attention(nn.Module):
    region = Region(
        inputs={"x": "batch res embed -> batch seq embed", "positions": "index seq"},
        outputs="batch seq embed +heads -> batch res embed",
        params={
            "wq.weight": "(heads head_dim) embed",
            "wk.weight": "(kv_heads head_dim) embed",
            "wv.weight": "(kv_heads head_dim) embed",
            "wo.weight": "embed (heads head_dim)",
        },
        cuts="batch seq heads kv_heads heads+kv_heads",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.config, self.head_dim = c, c.width
        self.wq = nn.Linear(c.embed, c.heads * c.width, bias=False)
        self.wk = nn.Linear(c.embed, c.kv_heads * c.width, bias=False)
        self.wv = nn.Linear(c.embed, c.kv_heads * c.width, bias=False)
        self.wo = nn.Linear(c.heads * c.width, c.embed, bias=False)
        self.core = AttentionCore(c.heads // c.kv_heads)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        q, k, v = (rearrange(w(x), "b s (h d) -> b s h d", d=self.head_dim) for w in (self.wq, self.wk, self.wv))
        positions = indices(positions, x.shape[1], x.device)
        q, k = (rope(t, positions, self.config.rope_base, self.config.rope_scaling) for t in (q, k))
        return self.wo(rearrange(self.core(q, k, v), "b s h d -> b s (h d)"))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    region = Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +ffn -> batch res embed",
        params={"gate.weight": "ffn embed", "up.weight": "ffn embed", "down.weight": "embed ffn"},
        cuts="batch seq ffn",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(c.embed, c.ffn, bias=False)
        self.up = nn.Linear(c.embed, c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    region = Region(
        inputs={"x": "batch res embed"},
        outputs="batch res embed",
        params={"attention_norm.weight": "embed", "mlp_norm.weight": "embed"},
        cuts="batch res",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.embed, eps=c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = nn.RMSNorm(c.embed, eps=c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    region = Region(
        inputs={"x": "batch res embed", "labels": "int batch seq"},
        outputs="+batch +seq =",
        params={"norm.weight": "embed"},
        cuts="batch seq res seq+res",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(c.embed, eps=c.norm_eps)
        self.loss = VocabularyLoss(c)

    def forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        return self.loss(self.norm(x), labels)


class Llama(nn.Module):
    """tokens, labels (batch, seq) int64 -> the sum of the loss over unmasked labels; without labels the logits."""

    region = Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq =",
        cuts="batch seq res seq+res",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.config = c
        self.embed = Embedding(c)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.head = Head(c)
        if c.tied:
            self.head.loss.weight = self.embed.weight
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """All initial values: normal, those that end a residual branch smaller by sqrt(2 layers) (GPT-2); norms one."""
        for name, p in self.named_parameters():
            if p.ndim == 1:
                nn.init.ones_(p)
            else:
                ends_branch = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(p, std=self.config.init_std / (math.sqrt(2 * self.config.layers) if ends_branch else 1))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x, labels)
