"""Causal attention over (batch, seq, heads, head_dim) with grouped key-value heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: int,
    head_index: Tensor | None = None,
    kv_index: Tensor | None = None,
) -> Tensor:
    """Softmax attention in which a query sees the keys at its own and earlier positions.

    q: (batch, seq, heads, head_dim); k, v: (batch, seq, kv_heads, head_dim); query head h reads key-value head
    h // group. head_index, kv_index: global indices of the heads held here, None for all of them. Where the parts
    of both do not match one to one (kv heads whole, or cut less often than heads) each query head picks its own.
    Returns (batch, seq, heads, head_dim).
    """
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads != kv_heads * group:
        if head_index is None or kv_index is None:
            raise ValueError(f"{heads} query heads and {kv_heads} kv heads in groups of {group} need their indices")
        pick = head_index // group - kv_index[0]
        k, v = k.index_select(2, pick), v.index_select(2, pick)
        group = 1
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
    return out.transpose(1, 2)
