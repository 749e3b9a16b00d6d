"""Whole tensors out of the blocks of all ranks, without DTensor, and a look whether copies agree, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_lm.layout import Layout
from dtensor_lm.sharding_plans.program import Program
from dtensor_lm.state import TrainState, locals_of

Whole = dict[str, Tensor]
T = TypeVar("T")
Blocks = Mapping[str, Mapping[str, Tensor]]  # kind -> name -> this rank's block


def to_first(value: T) -> list[T]:
    """Every rank's value, on rank 0; elsewhere an empty list. One exchange, whatever its size."""
    if dist.get_world_size() == 1:
        return [value]
    every: list[T] = [value] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, every or None)
    return every


def on_cpu(blocks: Blocks) -> Blocks:
    """Tensors that can be sent to another rank."""
    return {kind: {n: x.detach().cpu() for n, x in tensors.items()} for kind, tensors in blocks.items()}


def from_first(value: T) -> T:
    """Rank 0's value, on every rank."""
    box = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def assemble(blocks: list[Mapping[str, Tensor]], layouts: Mapping[str, Layout]) -> tuple[Whole, list[str]]:
    """(whole tensors, names of which two ranks hold different copies). blocks: by rank; one that does not have a name
    stores nothing of it.

    Raises ValueError where blocks do not cover a tensor.
    """
    whole: Whole = {}
    apart = []
    for name, layout in layouts.items():
        seen: dict[object, Tensor] = {}
        found = [(rank, of_rank[name]) for rank, of_rank in enumerate(blocks) if name in of_rank]
        if not found:
            raise ValueError(f"{name}: no rank stores it")
        out = whole[name] = torch.empty(layout.shape, dtype=found[0][1].dtype)
        for rank, block in found:
            box = layout.box(layout.mesh.coordinate(rank))
            if box not in seen:
                seen[box] = block
                out[tuple(slice(*span) for span in box)] = block
            elif not same_bits(seen[box], block):
                apart.append(name)
        if sum(block.numel() for block in seen.values()) != out.numel():
            raise ValueError(f"{name}: the blocks of all ranks are not the whole {list(layout.shape)}")
    return whole, sorted(set(apart))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN is the same as NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))) if a.numel() else True


def different_copies(state: TrainState, program: Program) -> list[str]:
    """Names of parameters of which two ranks hold different copies, bit for bit; every rank calls it."""
    every = to_first(on_cpu({"parameters": locals_of(state.parameters)}))
    layouts = {n: p.storage for n, p in program.parameters.items()}
    return from_first(assemble([of_rank["parameters"] for of_rank in every], layouts)[1] if every else [])
