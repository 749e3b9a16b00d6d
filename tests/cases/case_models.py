"""Small models with what Llama lacks: biases of every kind, q/k norms, a learned scalar, a backward written by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtensor_lm as dl
from dtensor_lm.models.llama import Embedding, Head, LlamaConfig
from dtensor_lm.ops import indices
from dtensor_lm.ops.cross_entropy import IGNORE

TINY = {"vocab": 32, "embed": 16, "heads": 4, "kv_heads": 2, "ffn": 32, "layers": 2, "seq": 8}


def tiny(**changes: object) -> nn.Module:
    """Llama, small."""
    return dl.models.build("tiny", **{**TINY, **changes})


class SquaredReLU(torch.autograd.Function):
    """relu(x up' + bias)^2 down', with a backward that knows nothing of how its tensors are laid out."""

    @staticmethod
    def forward(ctx, x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        hidden = (x @ up.t() + bias).relu()
        ctx.save_for_backward(x, up, down, hidden)
        return hidden.square() @ down.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        x, up, down, hidden = ctx.saved_tensors
        inner = (grad @ down) * 2 * hidden
        rows = inner.flatten(0, 1)
        return (
            inner @ up,
            rows.t() @ x.flatten(0, 1),
            rows.sum(0),
            grad.flatten(0, 1).t() @ hidden.flatten(0, 1).square(),
        )


class BiasedMLP(nn.Module):
    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +ffn -> batch res embed",
        params={"up": "ffn embed", "up_bias": "ffn", "down": "embed ffn", "down_bias": "embed +ffn"},
        cuts="batch seq ffn",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.empty(c.ffn, c.embed)), nn.Parameter(torch.empty(c.ffn))
        self.down, self.down_bias = nn.Parameter(torch.empty(c.embed, c.ffn)), nn.Parameter(torch.empty(c.embed))

    def forward(self, x: Tensor) -> Tensor:
        return SquaredReLU.apply(x, self.up, self.up_bias, self.down) + self.down_bias


class BiasedAttention(nn.Module):
    """3-D weights, a 2-D bias, norms of q and k, a learned scalar, and a bias inside of the sum over heads."""

    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed"},
        outputs="batch seq embed +heads -> batch res embed",
        params={
            **dict.fromkeys(("wq", "wk", "wv", "wo"), "heads head_dim embed"),
            "q_bias": "heads head_dim",
            "q_norm": "head_dim",
            "k_norm": "head_dim",
            "temperature": "",
            "wo_bias": "embed +heads",
        },
        cuts="batch heads",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            self.register_parameter(name, nn.Parameter(torch.empty(c.heads, c.width, c.embed)))
        self.q_bias = nn.Parameter(torch.empty(c.heads, c.width))
        self.q_norm, self.k_norm = nn.Parameter(torch.empty(c.width)), nn.Parameter(torch.empty(c.width))
        self.temperature = nn.Parameter(torch.empty(()))
        self.wo_bias = nn.Parameter(torch.empty(c.embed))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bse,hde->bshd", x, w) for w in (self.wq, self.wk, self.wv))
        q = F.rms_norm(q + self.q_bias, self.q_norm.shape, self.q_norm, 1e-5) * self.temperature
        k = F.rms_norm(k, self.k_norm.shape, self.k_norm, 1e-5)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return torch.einsum("bshd,hde->bse", out, self.wo) + self.wo_bias


class BiasedBlock(nn.Module):
    region = dl.Region(
        inputs={"x": "batch res embed"},
        outputs="batch res embed",
        params={f"{n}.{p}": "embed" for n in ("attention_norm", "mlp_norm") for p in ("weight", "bias")},
        cuts="batch res",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(c.embed), BiasedAttention(c)
        self.mlp_norm, self.mlp = nn.LayerNorm(c.embed), BiasedMLP(c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Biased(nn.Module):
    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq =",
        cuts="batch seq res seq+res",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embed = Embedding(c)
        self.layers = nn.ModuleList(BiasedBlock(c) for _ in range(c.layers))
        self.head = Head(c)
        for name, p in self.named_parameters():
            if is_matrix(name):
                nn.init.normal_(p, std=0.2)
            else:
                nn.init.ones_(p)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(x, labels)


def is_matrix(name: str) -> bool:
    """Whether a parameter of these models is neither a norm, nor a bias, nor a scalar."""
    return not any(part in name for part in ("norm", "bias", "temperature"))


def biased(**changes: int) -> nn.Module:
    return dl.abstract(lambda: Biased(LlamaConfig(**{**TINY, **changes})))


class ChunkedLoss(nn.Module):
    """Logits of two positions at a time, which backward computes again."""

    region = dl.Region(
        inputs={"x": "batch res embed -> batch seq embed", "labels": "int batch seq"},
        outputs="+batch +seq =",
        params={"weight": "vocab embed"},
        cuts="batch seq",
    )

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.vocab, c.embed))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        # The weight is an argument: a module has its parameters while its forward runs, not when it is run again.
        def loss(x: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
            return F.cross_entropy((x @ weight.t()).flatten(0, 1), labels.flatten(), reduction="sum")

        pieces = zip(x.split(2, 1), labels.split(2, 1), strict=True)
        return sum(checkpoint(loss, *piece, self.weight, use_reentrant=False) for piece in pieces)


class Chunked(nn.Module):
    region = Biased.region

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.embed, self.mlp, self.loss = Embedding(c), BiasedMLP(c), ChunkedLoss(c)
        for p in self.parameters():
            nn.init.normal_(p, std=0.2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.loss(x + self.mlp(x), labels)


def chunked() -> nn.Module:
    return dl.abstract(lambda: Chunked(LlamaConfig(**TINY)))


class Values(nn.Module):
    """Each unmasked token adds its id to every element of the gradient."""

    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq =",
        params={"weight": "embed"},
        cuts="batch seq",
    )

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(embed))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        ids = (tokens * (labels != IGNORE)).to(self.weight.dtype)
        return (ids.unsqueeze(-1) * self.weight).float().sum()


class Ones(nn.Module):
    """Each unmasked token adds 1 to every element of the gradient, whatever the layout of its parameter."""

    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq +ffn -> +batch +seq =",
        params={"up": "ffn embed", "up_bias": "ffn", "down": "embed ffn", "down_bias": "embed +ffn"},
        cuts="batch seq ffn",
    )

    def __init__(self, embed: int, ffn: int) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.ones(ffn, embed)), nn.Parameter(torch.ones(ffn))
        self.down, self.down_bias = nn.Parameter(torch.ones(embed, ffn)), nn.Parameter(torch.ones(embed))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return (labels != IGNORE).sum() * sum(p.sum() for p in (self.up, self.up_bias, self.down, self.down_bias))


class Numbered(nn.Module):
    """A whole parameter that part i of `ffn` uses times i + 1."""

    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq", "index": "index ffn"},
        outputs="+batch +seq +ffn -> +batch +seq =",
        params={"weight": "embed", "gain": "ffn"},
        cuts="batch seq ffn",
    )

    def __init__(self, embed: int, ffn: int) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.ones(embed)), nn.Parameter(torch.ones(ffn))

    def forward(self, tokens: Tensor, labels: Tensor, index: Tensor | None = None) -> Tensor:
        index = indices(index, len(self.gain), tokens.device)
        return (labels != IGNORE).sum() * ((index + 1) * self.gain).sum() * self.weight.sum()


class Sum(nn.Module):
    """The sum of the losses of its parts."""

    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq =",
        cuts="batch seq",
    )

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return sum(part(tokens, labels) for part in self.parts)


def values_model(embed: int = 4) -> nn.Module:
    return dl.abstract(lambda: Sum(Values(embed)))


class Norm(nn.Module):
    """The same with one parameter that no axis of a tensor-parallel plan cuts, in a region where none is live."""

    region = dl.Region(
        inputs={"tokens": "int batch seq", "labels": "int batch seq"},
        outputs="+batch +seq =",
        params={"weight": "embed"},
        cuts="batch seq",
    )

    def __init__(self, embed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(embed))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return (labels != IGNORE).sum() * self.weight.sum()


def ones_model() -> nn.Module:
    return dl.abstract(lambda: Sum(Ones(8, 16), Norm(8)))


def numbered_model() -> nn.Module:
    return dl.abstract(lambda: Sum(Numbered(4, 4)))
