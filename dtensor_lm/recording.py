"""Recording: build a model on the meta device and note every operation that gives a tensor its values.

What cannot be replayed element by element (`copy_`, `nn.init.orthogonal_`, a write to a slice) is refused by
name, never guessed. The one thing that cannot be seen is a model that asks `tensor.is_meta` itself and then
skips its own initialiser.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_lm.errors import ModelError
from dtensor_lm.recipes import COPIES, EMPTY, FUNCTIONS, Op, Recipe, outside_range, understood, wrong_dtype

FIX = "initialise all of it in place (nn.init.normal_, uniform_, trunc_normal_, constant_), or load its values"


@dataclass
class _History:
    """What happened to one storage, whose first tensor had `numel` elements of `dtype`.

    It holds the storage: the id of a freed one would come back for another tensor.
    """

    storage: torch.UntypedStorage
    numel: int
    dtype: torch.dtype
    ops: tuple[Op, ...] = ()
    refusal: str | None = None
    draw: int | None = None  # which random draw of the whole build the values come from

    @classmethod
    def born(cls, tensor: Tensor, refusal: str | None = None) -> _History:
        return cls(tensor.untyped_storage(), tensor.numel(), tensor.dtype, refusal=refusal)

    def covered_by(self, view: Tensor) -> bool:
        """Whether `view` holds each element of the storage exactly once, as elements of the same dtype."""
        if view.numel() != self.numel or view.dtype != self.dtype:
            return False
        dense = 1
        for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
            if size > 1 and stride != dense:
                return view.numel() == 0
            dense *= size
        return True


class _Recorder(TorchDispatchMode):
    """Keeps a history for every storage on the meta device; all its views share it."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: dict[int, _History] = {}
        self.draws = itertools.count()

    def of(self, tensor: Tensor) -> _History:
        """The history of `tensor`'s storage; refused if the storage appeared without a recorded operation."""
        unseen = "its values are given as data (torch.tensor, numpy, an outer tensor), and meta keeps no data"
        return self.histories.setdefault(tensor.untyped_storage()._cdata, _History.born(tensor, unseen))

    def apply(self, history: _History, op: Op, before: _History) -> None:
        """Set `history` to the result of `op`; a map starts from `before` (may be `history`)."""
        refusal = outside_range(op) or wrong_dtype(op, history.dtype)
        if op.name in FUNCTIONS:
            refusal = before.refusal or refusal
            history.ops, history.draw = (*before.ops, op), before.draw
        else:
            history.ops, history.draw = (op,), None if op.name == "fill" else next(self.draws)
        history.refusal = refusal

    def write(self, tensor: Tensor, op: Op | None, by: str) -> None:
        """An operation wrote to `tensor` in place."""
        history = self.of(tensor)
        if op is None:
            history.refusal = f"{by} cannot be replayed element by element"
        elif not history.covered_by(tensor):
            history.refusal = f"{by} writes only a part of it (a view or a slice)"
        else:
            self.apply(history, op, history)

    def create(self, result: Tensor, name: str, op: Op | None, origin: Any) -> None:
        """An operation returned `result` in a new storage; `origin` is its argument `self`, if it has one."""
        history = self.histories[result.untyped_storage()._cdata] = _History.born(result)
        before = self.of(origin) if isinstance(origin, Tensor) and origin.is_meta else None
        if name in EMPTY:
            history.refusal = f"{name} leaves it without values, and nothing writes them"
        elif op is not None and op.name not in FUNCTIONS:
            self.apply(history, op, history)
        elif before is None or (op is None and name not in COPIES):
            history.refusal = f"{name} cannot be replayed element by element"
        elif not before.covered_by(origin):
            history.refusal = f"{name} takes only a part of another tensor (a view or a slice)"
        elif op is not None:
            self.apply(history, op, before)
        else:
            history.ops, history.refusal, history.draw = before.ops, before.refusal, before.draw
            if not result.is_floating_point() and result.dtype != before.dtype:
                history.refusal = history.refusal or f"it is converted to {result.dtype}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        results = func(*args, **kwargs)
        bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        bound |= dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        name = schema.name.removeprefix("aten::")
        op = understood(name, bound)
        given = set()
        for argument in schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _meta_tensors(bound.get(argument.name)):
                given.add(tensor.untyped_storage()._cdata)
                if written:
                    self.write(tensor, op if argument.name == "self" else None, name)
        for result in _meta_tensors(results):
            if result.untyped_storage()._cdata not in given:
                self.create(result, name, op, bound.get("self"))
        return results


class _InitWatch(TorchFunctionMode):
    """Sees the initialisers of torch.nn.init that do nothing on the meta device, and hence record nothing.

    They betray themselves by reading `tensor.is_meta` (in torch 2.13: trunc_normal_, orthogonal_, sparse_ and
    dirac_). Watching that read, not replacing the functions, also catches `from torch.nn.init import ...`.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.is_meta.__get__ and args[0].is_meta:  # type: ignore[attr-defined]
            frame = sys._getframe(1)
            while frame.f_back and frame.f_globals.get("__name__") in (
                "torch.utils._device",
                "torch.overrides",
            ):
                frame = frame.f_back
            if frame.f_globals.get("__name__") == "torch.nn.init":
                known, by = frame.f_locals, frame.f_code.co_name.removeprefix("_no_grad_")
                wanted = ("mean", "std", "a", "b")
                op = None
                if by == "trunc_normal_" and all(isinstance(known.get(n), int | float) for n in wanted):
                    op = Op("trunc_normal", tuple(float(known[n]) for n in wanted))
                self.recorder.write(args[0], op, f"nn.init.{by}")
        return func(*args, **(kwargs or {}))


def _meta_tensors(value: Any) -> Iterator[Tensor]:
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, Tensor) and item.is_meta:
            yield item


def abstract(build: Callable[[], nn.Module]) -> nn.Module:
    """Run `build` on the meta device and attach the recipe of every parameter and buffer to the module.

    Nothing is refused here: `recipes` does that, so that a model whose values are loaded can still be built.
    """
    recorder = _Recorder()
    with torch.device("meta"), recorder, _InitWatch(recorder):
        model = build()
    if not isinstance(model, nn.Module):
        raise ModelError(f"abstract(build): build returned a {type(model).__name__}, not an nn.Module")
    found: dict[str, Recipe] = {}
    storages: dict[int, str] = {}
    draws: dict[int, str] = {}
    for name, tensor in _tensors(model).items():
        if is_lazy(tensor) or not tensor.is_meta:
            where = "in a lazy module, without a shape" if is_lazy(tensor) else f"on {tensor.device}, not on meta"
            found[name] = Recipe(refusal=f"it was created {where}")
            continue
        history = recorder.of(tensor)
        refusal = history.refusal
        owner = storages.setdefault(tensor.untyped_storage()._cdata, name)
        source = name if history.draw is None else draws.setdefault(history.draw, name)
        if owner != name:
            refusal = f"it shares the memory of {owner} without being the same parameter"
        elif not history.covered_by(tensor):
            refusal = "it is only a part of another tensor (a view or a slice)"
        elif source != name:
            refusal = refusal or f"it copies the random values of {source}"
        found[name] = Recipe(refusal=refusal) if refusal else Recipe(history.ops)
    model._recipes = found  # type: ignore[assignment]
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, then buffers, by canonical name: of a tied tensor only the first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def recipes(model: nn.Module) -> dict[str, Recipe]:
    """The recipe of every parameter and buffer of a model that `abstract` built, by canonical name.

    Raises ModelError that lists all parameters and buffers whose values cannot be replayed, with the reason.
    """
    known = getattr(model, "_recipes", None)
    if not isinstance(known, dict):
        raise ModelError(f"{type(model).__name__} has no recorded initial values", ["build it by abstract(...)"])
    parameters = dict(model.named_parameters())
    late = Recipe(refusal="it was added after abstract(...)")
    found = {name: known.get(name, late) for name in _tensors(model)}
    faults = [
        f"{'parameter' if name in parameters else 'buffer'} {name}: {recipe.refusal}; {FIX}"
        for name, recipe in found.items()
        if recipe.refusal
    ]
    if faults:
        raise ModelError(f"{type(model).__name__} has initial values that cannot be reproduced", faults)
    return found
