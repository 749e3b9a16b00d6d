"""A small causal language model in ordinary PyTorch, with names."""

import torch.nn.functional as F
from torch import nn

from dtensor_lm import Region
from dtensor_lm.ops import Embedding, VocabularyLoss, indices


class Attention(nn.Module):
    region = Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +heads -> batch res embed",
        params={
            **dict.fromkeys(("query.weight", "key.weight", "value.weight"), "(heads head_dim) embed"),
            **dict.fromkeys(("query.bias", "key.bias", "value.bias"), "(heads head_dim)"),
            "out.weight": "embed (heads head_dim)",
            "out.bias": "embed +heads",
        },
        cuts="batch heads",
    )

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            layer(x).view(x.shape[0], x.shape[1], -1, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    region = Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +ffn -> batch res embed",
        params={"up.weight": "ffn embed", "up.bias": "ffn", "down.weight": "embed ffn", "down.bias": "embed +ffn"},
        cuts="batch seq ffn",
    )

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    region = Region(
        inputs={"x": "batch res embed"},
        outputs="batch res embed",
        params=dict.fromkeys(("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"), "embed"),
        cuts="batch res",
    )

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    region = Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq", "index": "index res"},
        outputs="+batch +seq =",
        params={"positions.weight": "position embed", "norm.weight": "embed", "norm.bias": "embed"},
        cuts="batch seq res seq+res",
    )

    def __init__(self, vocab=256, width=96, layers=2, heads=6, seq=128):
        super().__init__()
        self.tokens = Embedding(vocab, width)
        self.positions = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = VocabularyLoss(vocab, width)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, labels=None, index=None):
        x = self.tokens(tokens) + self.positions(indices(index, tokens.shape[1], tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), labels)
