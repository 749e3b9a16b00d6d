"""Text as bytes, cut into windows of tokens. numpy only: nothing here knows of devices or processes.

corpus = load_corpus(None)                               # the standard library of the running Python
batches = Batches(corpus.train, batch=8, seq=256, seed=0)
tokens, labels = batches.rows(step=0, rows=[0, 1])       # (2, 256) each: rows 0 and 1 of global batch 0
"""

from dtensor_lm.data.batch import Batches, EvaluationBatches, evaluation_batches, validation_windows
from dtensor_lm.data.corpus import Corpus, Documents, load_corpus

__all__ = [
    "Batches",
    "Corpus",
    "Documents",
    "EvaluationBatches",
    "evaluation_batches",
    "load_corpus",
    "validation_windows",
]
