"""Text files as one long row of bytes, in a train and a validation part.

A token is a byte. Files stay on disk: the index holds their sizes only, and a read touches just the files
it needs. Without a path of the user's own, the text is the source of the running Python's standard library,
which every machine has.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dtensor_lm.errors import DataError

SEPARATOR = 0  # the byte after each document; no text file holds it
VALIDATION_PERCENT = 5
_NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SNIFFED_BYTES = 1 << 16


@dataclass(frozen=True)
class Part:
    """Bytes [start, stop) of a file, and the size (bytes) and time of change (ns) it had when indexed."""

    path: Path
    start: int
    stop: int
    size: int
    modified_ns: int


class Documents:
    """A virtual concatenation of parts of files, as bytes. `len()` counts tokens, separators included."""

    def __init__(self, parts: Sequence[Part], *, separated: bool = True) -> None:
        """`separated`: one byte 0 follows each part."""
        self.parts = tuple(parts)
        self._separators = int(separated)
        lengths = [part.stop - part.start + self._separators for part in self.parts]
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Tokens [start, stop), shape (stop - start,).

        Raises IndexError outside [0, len], DataError if a file was changed or removed since it was indexed.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens [{start}, {stop}) of documents with {len(self)} tokens")
        tokens = np.full(stop - start, SEPARATOR, dtype=np.uint8)
        first = int(np.searchsorted(self._ends, start, side="right"))
        for place in range(first, len(self.parts)):
            part, text_end = self.parts[place], int(self._ends[place]) - self._separators
            begin = text_end - (part.stop - part.start)
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, text_end)
            if low < high:
                text = _read_bytes(part, part.start + low - begin, high - low)
                tokens[low - start : high - start] = np.frombuffer(text, dtype=np.uint8)
        return tokens


@dataclass(frozen=True)
class Corpus:
    """A text with its train and validation documents."""

    name: str
    train: Documents
    validation: Documents
    skipped: Mapping[str, int] = field(default_factory=dict)  # reason -> number of files, e.g. {"binary": 2}
    vocab: int = 256

    def describe(self) -> str:
        """One line: files, bytes, both parts, and what was skipped."""
        parts = (*self.train.parts, *self.validation.parts)
        files, size = len({part.path for part in parts}), sum(part.stop - part.start for part in parts)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        skipped = f"; skipped {sum(self.skipped.values())} ({reasons})" if reasons else "; skipped 0"
        split = f"train {len(self.train):,} tokens, validation {len(self.validation):,} tokens"
        return f"{self.name}: {files:,} file{'s' * (files != 1)}, {size:,} bytes; {split}{skipped}"

    def decode(self, tokens: ArrayLike) -> str:
        """The text of `tokens` (one dim); what is not UTF-8, or no byte at all, becomes U+FFFD."""
        values = np.asarray(tokens, dtype=np.int64).reshape(-1)
        # 255 never occurs in UTF-8, so that a token outside of the bytes is replaced too.
        return np.where((values < 0) | (values > 255), 255, values).astype(np.uint8).tobytes().decode(errors="replace")


def load_corpus(path: str | None) -> Corpus:
    """Index the text at `path`: a file, a folder (with all folders below), or None: the standard library.

    A folder is split by file, about 5 % for validation, by a hash of the relative path; a single file is
    split by position: its last 5 % of bytes. Hidden, binary and empty files of a folder are skipped and
    counted. A file counts as text if its first 64 KiB are UTF-8 without a byte 0.

    Raises DataError if there is no text, if files cannot be read (naming all), or if one part would be empty.
    """
    if path is None:
        return _standard_library()
    try:
        root = Path(path).expanduser()
        mode = root.stat().st_mode
    except (RuntimeError, ValueError) as error:  # a user that does not exist, a byte 0
        raise DataError("The corpus cannot be read", [f"{path!r}: {error}; give an existing path"]) from error
    except OSError as error:
        raise DataError("The corpus cannot be read", [f"{path}: {_reason(error)}; give an existing path"]) from error
    if stat.S_ISDIR(mode):
        return _folder(path, root)
    if stat.S_ISREG(mode):
        return _file(path, root)
    raise DataError("The corpus cannot be read", [f"{path}: is neither a file nor a folder; give a text file"])


def _standard_library() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    name = f"standard library of Python {platform.python_version()}"
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [sub for sub in folders if sub not in _NOT_THE_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    parts = {file.relative_to(root).as_posix(): _index(file) for file in files}
    if not parts:
        fix = f"{root}: holds no *.py files; give the path of a text file or folder"
        raise DataError("The standard library of this Python comes without its source", [fix])
    texts = {key: part for key, part in parts.items() if part.size > 0}
    return _split_by_file(name, texts, Counter({"empty": len(parts) - len(texts)}))


def _folder(name: str, root: Path) -> Corpus:
    skipped: Counter[str] = Counter()
    faults: list[str] = []
    texts: dict[str, Part] = {}
    for file in _visible(root, skipped, faults):
        try:
            kind = _kind(file)
            if kind == "text":
                texts[file.relative_to(root).as_posix()] = _index(file)
            else:
                skipped[kind] += 1
        except OSError as error:
            faults.append(f"{file}: {_reason(error)}; make it readable, or move it out of the folder")
    if faults:
        raise DataError("The corpus cannot be read", sorted(faults))
    if not texts:
        seen = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items())) or "nothing"
        raise DataError("The corpus is empty", [f"{name}: holds no UTF-8 text ({seen}); add text files"])
    return _split_by_file(name, texts, skipped)


def _file(name: str, file: Path) -> Corpus:
    try:
        kind, part = _kind(file), _index(file)
    except OSError as error:
        raise DataError("The corpus cannot be read", [f"{name}: {_reason(error)}; make it readable"]) from error
    if kind == "empty":
        raise DataError("The corpus is empty", [f"{name}: has no bytes; give a file with text"])
    if kind != "text":
        raise DataError("The corpus cannot be read", [f"{name}: is not UTF-8 text; convert it"])
    before, after = _cut(part)
    if after.start == after.stop:
        fault = f"{name}: the last {VALIDATION_PERCENT} % of {part.size} bytes is nothing; give at least 20 bytes"
        raise DataError("The validation part is empty", [fault])
    # The cut is in the middle of a document: no separator.
    return Corpus(name, Documents([before], separated=False), Documents([after], separated=False))


def _split_by_file(name: str, texts: Mapping[str, Part], skipped: Counter[str]) -> Corpus:
    """Each file goes to the part that the hash of its relative path names, whatever other files there are.

    Where that leaves a part empty (few files), the last bytes of each file are for validation instead.
    """
    parts: dict[bool, list[Part]] = {False: [], True: []}
    for key in sorted(texts):
        digest = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest()
        parts[int.from_bytes(digest, "little") % 100 < VALIDATION_PERCENT].append(texts[key])
    if not parts[False] or not parts[True]:
        cuts = [_cut(texts[key]) for key in sorted(texts)]
        parts = {False: [before for before, _ in cuts], True: [after for _, after in cuts if after.stop > after.start]}
    if not parts[True]:
        size = sum(part.size for part in texts.values())
        fault = f"{name}: the last {VALIDATION_PERCENT} % of files of {size} bytes is nothing; add text"
        raise DataError("The validation part is empty", [fault])
    reasons = {reason: count for reason, count in skipped.items() if count}
    return Corpus(name, Documents(parts[False]), Documents(parts[True]), reasons)


def _cut(part: Part) -> tuple[Part, Part]:
    """A file by position: what is for training, and the last bytes for validation."""
    cut = part.size - part.size * VALIDATION_PERCENT // 100
    return (
        Part(part.path, 0, cut, part.size, part.modified_ns),
        Part(part.path, cut, part.size, part.size, part.modified_ns),
    )


def _visible(root: Path, skipped: Counter[str], faults: list[str]) -> Iterator[Path]:
    """Every file below `root` that is not hidden; counts what is hidden or no regular file."""

    def unreadable(error: OSError) -> None:
        faults.append(f"{error.filename}: {_reason(error)}; make it readable, or move it out of the folder")

    for folder, folders, names in os.walk(root, onerror=unreadable):
        hidden = [name for name in (*folders, *names) if name.startswith(".")]
        if hidden:
            skipped["hidden"] += len(hidden)
        folders[:] = sorted(set(folders) - set(hidden))
        for name in sorted(set(names) - set(hidden)):
            file = Path(folder, name)
            if file.is_file():
                yield file
            else:
                skipped["no regular file"] += 1


def _kind(file: Path) -> str:
    """'text', 'binary' or 'empty', from the first bytes of the file."""
    with open(file, "rb") as stream:
        head = stream.read(_SNIFFED_BYTES)
    if not head:
        return "empty"
    try:
        # Not final: the last character of the head may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < _SNIFFED_BYTES)
    except UnicodeDecodeError:
        return "binary"
    return "binary" if SEPARATOR in head else "text"


def _index(file: Path) -> Part:
    status = file.stat()
    return Part(file, 0, status.st_size, status.st_size, status.st_mtime_ns)


def _read_bytes(part: Part, start: int, count: int) -> bytes:
    try:
        with open(part.path, "rb") as stream:
            status = os.fstat(stream.fileno())
            stream.seek(start)
            text = stream.read(count)
    except OSError as error:
        fault = f"{part.path}: {_reason(error)}; restore it, or start again"
        raise DataError("A file of the corpus can no longer be read", [fault]) from error
    if (status.st_size, status.st_mtime_ns) != (part.size, part.modified_ns) or len(text) != count:
        fault = f"{part.path}: had {part.size} bytes, now {status.st_size}; restore it, or start again"
        raise DataError("A file of the corpus was changed during the run", [fault])
    return text


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
