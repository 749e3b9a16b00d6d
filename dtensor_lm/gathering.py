"""Parameters of a unit gathered for a forward, let go of, and gathered again where backward asks for their values."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dtensor_lm.rounds import BoundRound
from dtensor_lm.sharding_plans.predict import gather_rounds, scatter_rounds
from dtensor_lm.sharding_plans.program import Gather, Program


class Holder(Protocol):
    """Who keeps what one backward has gathered again, so that the next can let it go."""

    regathered: Regather | None


class GatherGroup:
    """The coalesced collectives of one `Gather`, bound to this rank."""

    def __init__(self, g: Gather, program: Program, rank: int) -> None:
        self.names, self.regather = g.parameters, g.regather
        members = {n: program.parameters[n] for n in g.parameters}
        layouts = {n: (p.storage, p.gathered) for n, p in members.items()}
        self.forward = [BoundRound(r, program.mesh, rank) for r in gather_rounds(layouts, program.dtype)]
        back = {n: (p.gathered, p.gradients) for n, p in members.items()}
        self.backward = [BoundRound(r, program.mesh, rank) for r in scatter_rounds(back, program.master_dtype)]
        self.dtype = getattr(torch, program.master_dtype)

    def gather(self, shards: list[Tensor]) -> list[Tensor]:
        have = dict(zip(self.names, shards, strict=True))
        for r in self.forward:
            have.update(r.gather(have))
        return [have[n] for n in self.names]

    def scatter(self, grads: list[Tensor]) -> list[Tensor]:
        have = {n: g.to(self.dtype) for n, g in zip(self.names, grads, strict=True)}
        for r in self.backward:
            have.update(r.scatter(have))
        return [have[n] for n in self.names]


class Gathered(torch.autograd.Function):
    """Shards -> what regions use. The gradient goes to the leaves, which lie in the gradients' layout."""

    @staticmethod
    def forward(ctx: FunctionCtx, g: GatherGroup, again: Regather, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.again = g, again  # type: ignore[attr-defined]
        ctx.set_materialize_grads(True)
        shards = tensors[: len(g.names)]
        return tuple(t.view_as(t) for t in g.gather(list(shards)))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, again = ctx.group, ctx.again  # type: ignore[attr-defined]
        again.release()
        return (None, None, *[None] * len(g.names), *g.scatter(list(grads)))


class Own(torch.autograd.Function):
    """One gathered parameter. A backward in two halves needs a node for each: with one for a whole unit, its second
    half would go through all of the unit again. Here gradients stay as they are until the step reduces them."""

    @staticmethod
    def forward(ctx: FunctionCtx, gathered: Tensor, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype  # type: ignore[attr-defined]
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, grads[0].to(ctx.dtype), None  # type: ignore[attr-defined]


class Regather:
    """One call of a unit: saved tensors that live in gathered storage are kept as (shard, view) and gathered again."""

    def __init__(self, owner: Holder, root: bool) -> None:
        self.owner, self.root = owner, root
        self.places: dict[int, tuple[int, int]] = {}
        self.groups: list[tuple[GatherGroup, list[Tensor]]] = []
        self.cache: dict[int, list[Tensor]] = {}

    def register(self, g: GatherGroup, shards: list[Tensor], out: tuple[Tensor, ...]) -> None:
        for i, whole in enumerate(out):
            if whole.untyped_storage().data_ptr() != shards[i].untyped_storage().data_ptr():
                self.places[whole.untyped_storage().data_ptr()] = (len(self.groups), i)
        self.groups.append((g, shards))

    def pack(self, x: Tensor) -> Any:
        place = self.places.get(x.untyped_storage().data_ptr()) if x.numel() else None
        return x if place is None else (place, x.size(), x.stride(), x.storage_offset())

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        (which, i), size, stride, offset = kept
        if which not in self.cache:
            # Backward goes unit by unit, so only one of them holds whole weights; the model's own parameters may
            # be asked for before, between and after its units, and stay.
            if not self.root:
                if self.owner.regathered is not None and self.owner.regathered is not self:
                    self.owner.regathered.release()
                self.owner.regathered = self
            g, shards = self.groups[which]
            with torch.no_grad():
                self.cache[which] = g.gather(shards)
        return self.cache[which][i].as_strided(size, stride, offset)

    def release(self) -> None:
        self.cache.clear()
        if self.owner.regathered is self:
            self.owner.regathered = None
