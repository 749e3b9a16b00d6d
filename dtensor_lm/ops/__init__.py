"""The few operations that know that they may hold a part only."""

from dtensor_lm.ops.attention import causal_attention
from dtensor_lm.ops.cross_entropy import cross_entropy
from dtensor_lm.ops.dropout import Dropout, Random, dropout
from dtensor_lm.ops.embedding import embedding
from dtensor_lm.ops.parts import Parts, indices

__all__ = ["Dropout", "Parts", "Random", "causal_attention", "cross_entropy", "dropout", "embedding", "indices"]
