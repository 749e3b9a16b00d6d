"""Faults of the user's input. They are collected, and shown together, without a traceback (exit code 2)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """Input that cannot be used: a title and every fault that was found, one line each.

    Each fault names the place and the smallest change that repairs it.
    """

    def __init__(self, title: str, faults: Sequence[str] = ()) -> None:
        self.title = title
        self.faults = tuple(faults)
        super().__init__("\n".join([title, *(f"  - {fault}" for fault in self.faults)]))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.title, self.faults)


class MeshError(UserError):
    """A mesh that cannot exist, or that does not fit the number of processes."""


class PlanError(UserError):
    """A plan that does not fit the model or the mesh; lists every fault."""


class ModelError(UserError):
    """A model whose signatures do not fit its code, or whose initial values cannot be reproduced."""


class ConfigError(UserError):
    """An option or a configuration file that cannot be used."""


class DataError(UserError):
    """A corpus that cannot be read or is too small."""


class ScheduleError(UserError):
    """A pipeline schedule that cannot be read, made or run; lists every fault."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint ' (did you mean ...?)' with the nearest known names, or ''."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
