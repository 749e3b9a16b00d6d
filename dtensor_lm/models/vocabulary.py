"""The two ends of a language model: the table of tokens, and logits with their loss."""

from __future__ import annotations

from typing import Protocol

from dtensor_lm import ops


class Ends(Protocol):
    """What a model's config says of its ends."""

    @property
    def vocab(self) -> int: ...
    @property
    def embed(self) -> int: ...
    @property
    def label_smoothing(self) -> float: ...
    @property
    def z_loss(self) -> float: ...


class Embedding(ops.Embedding):
    def __init__(self, c: Ends) -> None:
        super().__init__(c.vocab, c.embed)


class VocabularyLoss(ops.VocabularyLoss):
    def __init__(self, c: Ends) -> None:
        super().__init__(c.vocab, c.embed, c.label_smoothing, c.z_loss)
