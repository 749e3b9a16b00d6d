"""Batches for a Program: each rank reads its part of the global batch, a pure function of the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_lm import process_groups
from dtensor_lm.data import Batches, Corpus, evaluation_batches, load_corpus
from dtensor_lm.errors import DataError
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.training.step import Batch


class Feed:
    """`batch(step)` and `validation()` of a corpus.

    data: a file or folder of text, None for the default corpus; evaluation: sequences of a validation, None for all.
    The same tokens in the same order on every mesh. Raises `DataError` for a corpus that cannot serve.
    """

    def __init__(
        self,
        program: Program,
        data: str | None = None,
        seed: int = 0,
        evaluation: int | None = 64,
        device: str = "auto",
    ) -> None:
        self.corpus: Corpus = load_corpus(data)
        self.program = program
        self.device = process_groups.device(device)
        vocab = program.sizes["vocab"]
        if vocab < self.corpus.vocab:
            raise DataError(f"the corpus has {self.corpus.vocab} token ids, the model's vocabulary is {vocab}")
        self.rows = program.batch // program.micro_batches  # of one micro-batch, over all ranks
        self.training = Batches(self.corpus.train, batch=program.batch, seq=program.seq, seed=seed)
        self.evaluation = evaluation_batches(
            self.corpus.validation, batch=self.rows, seq=program.seq, sequences=evaluation
        )

    def _part(self) -> tuple[range, slice]:
        place = self.program.mesh.coordinate(dist.get_rank() if dist.is_initialized() else 0)
        (start, stop), (first, last) = self.program.inputs["tokens"].box(place)
        return range(start, stop), slice(first, last)

    def batch(self, step: int) -> Batch:
        """This rank's part of the global batch of a step, one mapping per micro-batch."""
        mine, columns = self._part()
        return [
            self._tensors(self.training.rows(step, [m * self.rows + r for r in mine]), columns)
            for m in range(self.program.micro_batches)
        ]

    def validation(self) -> Iterator[dict[str, Tensor]]:
        """This rank's parts of the validation batches; sequences past the last are masked padding."""
        mine, columns = self._part()
        for i in range(len(self.evaluation)):
            yield self._tensors(self.evaluation.rows(i, list(mine)), columns)

    def _tensors(self, rows: tuple[Any, Any], columns: slice) -> dict[str, Tensor]:
        names = ("tokens", "labels")
        return {n: torch.from_numpy(x[:, columns].copy()).to(self.device) for n, x in zip(names, rows, strict=True)}

    def digest(self) -> tuple[int, int, int]:
        """What must be the same on every rank: lengths, and the sum of the first tokens."""
        train = self.corpus.train
        return len(train), len(self.corpus.validation), int(train.read(0, min(4096, len(train))).sum())
