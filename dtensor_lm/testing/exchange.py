"""Parts of a region that exchange sums and maxima, run at once in threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

SECONDS = 60.0  # after which a part that waits for others gives up

Result = TypeVar("Result")


class Exchange:
    """Where k parts meet: each brings a tensor and gets the combination of all, outside of autograd."""

    def __init__(self, k: int) -> None:
        self.barrier, self.slots = threading.Barrier(k, timeout=SECONDS), [torch.empty(0)] * k

    def part(self, i: int) -> PartOf:
        return PartOf(self, i)

    def every(self, i: int, x: Tensor) -> Tensor:
        self.slots[i] = x.detach()
        self.barrier.wait()
        together = torch.stack(self.slots)
        self.barrier.wait()  # nobody brings the next tensor before all have read this one
        return together


class PartOf:
    """One part's side of an exchange: the `Parts` that a region is given."""

    def __init__(self, exchange: Exchange, i: int) -> None:
        self.exchange, self.i = exchange, i

    def sum(self, x: Tensor, dims: str) -> Tensor:
        return self.exchange.every(self.i, x).sum(0)

    def max(self, x: Tensor, dims: str) -> Tensor:
        return self.exchange.every(self.i, x).amax(0)


def in_threads(runs: Sequence[Callable[[], Result]], exchange: Exchange) -> list[Result]:
    """The results of all runs. Raises the first error that is not another part's failure."""
    results: dict[int, Result] = {}
    errors: list[Exception] = []

    def work(i: int) -> None:
        try:
            results[i] = runs[i]()
        except Exception as error:
            errors.append(error)
            exchange.barrier.abort()  # nobody waits for a part that failed

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [results[i] for i in range(len(runs))]
