"""Operations against formulas written again: a mesh and one device run the same code, so equality cannot tell."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import dtensor_lm as dl
from dtensor_lm.collectives import GroupParts
from dtensor_lm.initial_values import draw, recipes
from dtensor_lm.models.gpt import AttentionCore
from dtensor_lm.models.llama import RopeScaling, rope
from dtensor_lm.ops import causal_attention, cross_entropy
from dtensor_lm.ops.dropout import Moment, Site
from dtensor_lm.testing.workers import pool

pytestmark = pytest.mark.quick
VOCAB = 12


def example(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits (batch, seq, vocab) and labels (batch, seq), some of them masked."""
    g = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(2, 5, VOCAB, generator=g, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (2, 5), generator=g)
    labels[0, 1] = labels[1, 3:] = -100
    return logits, labels


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.1, 0.01)])
def test_gradients_of_the_loss(smoothing: float, z: float) -> None:
    """Of the loss and of every logit, against autograd through torch's own cross-entropy and logsumexp."""
    logits, labels = example()
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = cross_entropy(ours, labels, VOCAB, label_smoothing=smoothing, z_loss=z)
    expected = F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="sum")
    expected = expected + z * theirs.logsumexp(-1).square()[labels >= 0].sum()
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def cut_loss(scale: float) -> tuple[float, Tensor]:
    """The loss of logits in float32 whose vocabulary lies on two ranks, and the gradient of this rank's part."""
    logits, labels = example(scale)
    index = torch.arange(VOCAB).chunk(2)[dist.get_rank()]
    mine = logits[..., index].float().requires_grad_()
    loss = cross_entropy(mine, labels, VOCAB, index, GroupParts(dl.Mesh(tp=2), ("tp",)))
    loss.backward()
    assert mine.grad is not None
    return float(loss.detach()), mine.grad


def test_large_logits_over_a_cut_vocabulary() -> None:
    """exp overflows at 88 in float32: all parts subtract the largest logit of the whole vocabulary."""
    logits, labels = example(2000.0)
    logits = (logits + 4000.0).float().requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    (loss, left), (same, right) = pool(2).run(cut_loss, 2000.0)
    assert loss == same == pytest.approx(expected.item(), rel=1e-4)
    torch.testing.assert_close(torch.cat([left, right], -1), logits.grad, rtol=1e-4, atol=1e-4)


def test_attention_whose_dropout_keeps_all() -> None:
    """The attention that can drop weights is written in plain operators; without dropout it is the fused one."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, 4, 8, generator=g, dtype=torch.float64) for _ in range(3))
    written = AttentionCore(1e-300).train()(q, k, v, Site("core.random").at(Moment.of(0, 0)))
    torch.testing.assert_close(written, causal_attention(q, k, v, 1), rtol=1e-13, atol=1e-14)


def test_stretched_frequencies() -> None:
    """Llama 3.1's scaling by wave lengths: short ones stay, long ones are stretched, the middle is interpolated."""
    s, base, half = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq=8192), 5e5, 64
    expected = []
    for i in range(half):
        frequency = base ** (-i / half)
        wave = 2 * math.pi / frequency
        if wave > s.original_seq / s.low_freq_factor:
            frequency /= s.factor
        elif wave > s.original_seq / s.high_freq_factor:
            smooth = (s.original_seq / wave - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
            frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
        expected.append(frequency)
    x = torch.cat([torch.ones(half), torch.zeros(half)]).double().expand(1, 3, 1, 2 * half)
    positions = torch.tensor([0, 1, 2])  # the largest frequency is 1, so angles are below pi
    cos, sin = rope(x, positions, base, s).squeeze().chunk(2, -1)
    wanted = torch.outer(positions.double(), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(torch.atan2(sin, cos), wanted, rtol=1e-9, atol=0)
    assert len({round(f / base ** (-i / half), 3) for i, f in enumerate(expected)}) > 3  # all three kinds are there


def test_initial_sizes() -> None:
    """Weights that end a residual branch are smaller by sqrt(2 layers), norms are one, all others are normal."""
    model = dl.models.build("tiny", layers=8, init_std=0.5)
    known = recipes(model)
    for name, p in model.named_parameters():
        values = draw(known[name], name, 0, p.shape, [(0, n) for n in p.shape], torch.float64)
        if "norm" in name:
            assert (values == 1).all()
        else:
            std = 0.5 / 4 if name.endswith(("wo.weight", "down.weight")) else 0.5
            assert values.std().item() == pytest.approx(std, rel=0.03), name
