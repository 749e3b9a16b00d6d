"""When two modules compute the same function of their inputs and parameters: repeated layers are looked at once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

_INTERNALS = frozenset(vars(nn.Module()))


def plain(value: Any) -> Hashable:
    """A value as something that compares: tensors by shape and dtype, what cannot be hashed by identity."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def likeness(module: nn.Module) -> Hashable:
    """Equal for modules of equal classes, settings, parameter shapes and structure. Buffers make a module unlike
    any other."""
    return tuple(
        (
            path,
            type(m),
            tuple((n, plain(v)) for n, v in vars(m).items() if n not in _INTERNALS),
            tuple((n, plain(p)) for n, p in m.named_parameters(recurse=False)),
            tuple(id(b) for b in m.buffers(recurse=False)),
        )
        for path, m in module.named_modules(remove_duplicate=False)
    )
