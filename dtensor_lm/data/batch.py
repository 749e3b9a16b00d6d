"""Which tokens are in which row of which batch: a pure function of the step.

Documents of T tokens hold n = (T - 1) // seq windows; window w is the tokens [w * seq, w * seq + seq + 1), so
that neighbours overlap by one token and every token but the first is a label exactly once. No state is saved:
a run that resumes at a step, on any mesh, asks for that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dtensor_lm.errors import DataError

IGNORED_LABEL = -100  # what torch.nn.functional.cross_entropy leaves out by default
Rows = tuple[NDArray[np.int64], NDArray[np.int64]]


class Tokens(Protocol):
    """What a batch needs of its documents."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[np.uint8]: ...


class Batches:
    """Global batches of `batch` windows of `seq` tokens, shuffled anew in every epoch.

    Sample i of the endless order is place i % n of epoch i // n; batch `step` is the samples
    [step * batch, (step + 1) * batch), across the borders of epochs. The order of an epoch is the permutation
    that numpy's Philox, keyed by (seed, epoch), draws; without `shuffle` it is the order of the text.

    Raises DataError if the documents are shorter than one window, or if `batch` or `seq` is not positive.
    """

    def __init__(self, documents: Tokens, *, batch: int, seq: int, seed: int, shuffle: bool = True) -> None:
        _check_sizes(batch=batch, seq=seq)
        self.documents, self.batch, self.seq, self.seed, self.shuffle = documents, batch, seq, seed, shuffle
        self.windows = _count_windows(documents, seq)
        self._order: tuple[int, NDArray[np.int64]] | None = None  # the epoch last asked for: only a cache

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """The window in each row of the global batch `step`, shape (batch,)."""
        return self._windows_of(step, np.arange(self.batch))

    def rows(self, step: int, rows: Sequence[int]) -> Rows:
        """(tokens, labels) of these rows of the global batch `step`, each (len(rows), seq); reads no other.

        The label of a token is the token after it. Raises IndexError if `step` or a row does not exist.
        """
        return _stack(self.documents, self._windows_of(step, _checked(rows, self.batch)).tolist(), self.seq)

    def _windows_of(self, step: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if step < 0:
            raise IndexError(f"step {step}: steps count from 0")
        epochs, places = np.divmod(rows + step * self.batch, self.windows)
        if not self.shuffle:
            return places
        windows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            windows[here] = self._epoch(epoch)[places[here]]
        return windows

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(self.windows)
            self._order = epoch, order
        return self._order[1]


class EvaluationBatches:
    """`sequences` windows spread evenly over the text, each exactly once; `len()` counts the batches.

    Sequence i is window i * windows // sequences: the first ones would be the files whose names sort first.
    The rows of the last batch past the last sequence are padding: tokens 0, labels -100. So the mean loss
    over all labels that count is the same for every batch size.
    """

    def __init__(self, documents: Tokens, *, batch: int, seq: int, sequences: int | None) -> None:
        _check_sizes(batch=batch, seq=seq)
        self.documents, self.batch, self.seq = documents, batch, seq
        self.windows = _count_windows(documents, seq)
        self.sequences = validation_windows(documents, seq=seq, limit=sequences)

    def __len__(self) -> int:
        return -(-self.sequences // self.batch)

    def rows(self, i: int, rows: Sequence[int]) -> Rows:
        """(tokens, labels) of these rows of batch `i`, each (len(rows), seq), padded past the last sequence.

        Raises IndexError if the batch or a row does not exist.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"batch {i}: there are {len(self)} batches")
        places = (_checked(rows, self.batch) + i * self.batch).tolist()
        windows = [p * self.windows // self.sequences if p < self.sequences else None for p in places]
        return _stack(self.documents, windows, self.seq)


def evaluation_batches(documents: Tokens, *, batch: int, seq: int, sequences: int | None) -> EvaluationBatches:
    """Batches of at most `sequences` windows, spread evenly (None: all); raises DataError as `Batches`."""
    return EvaluationBatches(documents, batch=batch, seq=seq, sequences=sequences)


def validation_windows(documents: Tokens, *, seq: int, limit: int | None) -> int:
    """How many windows an evaluation has: at most `limit` (None: all). Raises DataError if not even one."""
    _check_sizes(seq=seq, sequences=1 if limit is None else limit)
    windows = _count_windows(documents, seq)
    return windows if limit is None else min(windows, limit)


def _count_windows(documents: Tokens, seq: int) -> int:
    tokens = len(documents)
    windows = (tokens - 1) // seq
    if windows < 1:
        longest = f"the longest sequence that works is {tokens - 1}" if tokens > 1 else "add text"
        fault = f"{tokens} tokens are available, seq = {seq} needs {seq + 1}; {longest}"
        raise DataError("The documents are shorter than one sequence", [fault])
    return windows


def _check_sizes(**sizes: int) -> None:
    faults = [f"{name} = {size}: must be at least 1" for name, size in sizes.items() if size < 1]
    if faults:
        raise DataError("Sizes that cannot be used", faults)


def _checked(rows: Sequence[int], batch: int) -> NDArray[np.int64]:
    wanted = np.asarray(rows, dtype=np.int64)
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < batch):
        raise IndexError(f"rows {list(rows)} of a batch of {batch}")
    return wanted


def _stack(documents: Tokens, windows: Sequence[int | None], seq: int) -> Rows:
    """Read these windows, None for padding: tokens and labels, each (len(windows), seq)."""
    tokens = np.zeros((len(windows), seq), dtype=np.int64)
    labels = np.full((len(windows), seq), IGNORED_LABEL, dtype=np.int64)
    for row, window in enumerate(windows):
        if window is not None:
            text = documents.read(window * seq, window * seq + seq + 1)
            tokens[row], labels[row] = text[:-1], text[1:]
    return tokens, labels
