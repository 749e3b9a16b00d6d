"""Look-up in a table whose rows may be cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor_lm.region import Region


def check_ids(ids: Tensor, vocab: int, what: str) -> None:
    """Raises, on every mesh, for an id outside [0, vocab). On an accelerator the check is asynchronous."""
    if ids.is_meta:
        return
    bad = (ids < 0) | (ids >= vocab)
    if ids.device.type == "cpu":
        if bool(bad.any()):
            raise IndexError(f"{what} {int(ids[bad][0])} lies outside the vocabulary of {vocab}")
    else:
        torch._assert_async(~bad.any(), f"{what} outside the vocabulary of {vocab}")


def embedding(ids: Tensor, weight: Tensor, vocab: int, index: Tensor | None = None) -> Tensor:
    """Rows of `weight` for `ids`; zeros for ids whose row another part holds, so that the parts sum to the result.

    ids: (batch, seq) int64; weight: (vocab or its part, embed); vocab: rows of the whole table;
    index: (rows of weight,) the global ids of the rows, contiguous; None for the whole table.
    Returns (batch, seq, embed). Raises IndexError for an id outside the vocabulary.
    """
    check_ids(ids, vocab, "token id")
    if index is None or len(index) == vocab:
        return F.embedding(ids, weight)
    local = ids - index[0]
    mine = (local >= 0) & (local < len(index))
    return F.embedding(local.where(mine, 0), weight) * mine.unsqueeze(-1).to(weight.dtype)


class Embedding(nn.Module):
    """`nn.Embedding` with names: ids (batch, seq) int64 -> (batch, seq, embed); its rows may be cut."""

    region = Region(
        inputs={"ids": "int batch seq", "index": "index vocab"},
        outputs="batch seq embed +vocab -> batch res embed",
        params={"weight": "vocab embed"},
        cuts="batch seq vocab",
    )

    def __init__(self, vocab: int, embed: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.weight = nn.Parameter(torch.empty(vocab, embed))
        nn.init.normal_(self.weight)

    def forward(self, ids: Tensor, index: Tensor | None = None) -> Tensor:
        return embedding(ids, self.weight, self.vocab, index)
