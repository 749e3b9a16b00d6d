"""What a mutation is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class Stale(ValueError):
    """The text that a mutation replaces does not stand in its file exactly once: the entry needs a new one."""


@dataclass(frozen=True)
class Mutation:
    """A fault: in `file` (below the package) the text `old`, which stands there exactly once, becomes `new`.

    tests: node ids, each a test or a function with all its parameters; the first of them that fails is the killer.
    sees: a pattern that what the failing test says must match, so that an error for another reason is no kill.
    """

    id: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    sees: str

    def apply(self, package: Path) -> None:
        """Changes the file below `package`. Raises `Stale`."""
        path = package / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (found := text.count(self.old)) != 1:
            raise Stale(f"{self.file} has the text {found} times: {self.old!r}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
