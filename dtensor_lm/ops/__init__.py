"""The few operations that know that they may hold a part only, and the modules with names that are made of them."""

from dtensor_lm.ops.attention import causal_attention
from dtensor_lm.ops.cross_entropy import VocabularyLoss, cross_entropy
from dtensor_lm.ops.dropout import Dropout, Random, dropout
from dtensor_lm.ops.embedding import Embedding, embedding
from dtensor_lm.ops.parts import Parts, indices

__all__ = [
    "Dropout", "Embedding", "Parts", "Random", "VocabularyLoss", "causal_attention", "cross_entropy", "dropout",
    "embedding", "indices",
]  # fmt: skip
