"""The corpus and its batches: every token once, the same on every mesh, and errors that say the fix."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dtensor_lm.data.corpus as corpus_module
from dtensor_lm.data import Batches, Documents, evaluation_batches, load_corpus, validation_windows
from dtensor_lm.errors import DataError

pytestmark = pytest.mark.quick


class Counting:
    """Documents whose token at place i is i % 251; remembers what was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert 0 <= start <= stop <= self.size
        self.reads.append((start, stop))
        return (np.arange(start, stop) % 251).astype(np.uint8)


def folder_of(root: Path, count: int = 60) -> Path:
    for i in range(count):
        file = root / f"sub{i % 3}" / f"text{i}.txt"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(f"text {i} " + "äb" * i)
    return root


def fails(path: Path | str) -> str:
    with pytest.raises(DataError) as error:
        load_corpus(str(path))
    return str(error.value)


# ---- batches -----------------------------------------------------------------------------------------------


@pytest.mark.case("DATA-05")
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("tokens", "seq", "batch"), [(1001, 10, 4), (1007, 10, 7), (11, 10, 3), (64, 1, 5)])
def test_every_token_but_the_first_is_a_label_once_per_epoch(tokens: int, seq: int, batch: int, shuffle: bool) -> None:
    documents = Counting(tokens)
    batches = Batches(documents, batch=batch, seq=seq, seed=3, shuffle=shuffle)
    n = (tokens - 1) // seq
    for step in range(-(-2 * n // batch)):
        batches.rows(step, range(batch))
    assert all(stop - start == seq + 1 for start, stop in documents.reads)
    for epoch in (documents.reads[:n], documents.reads[n : 2 * n]):
        label_places = sorted(place for start, stop in epoch for place in range(start + 1, stop))
        assert label_places == list(range(1, n * seq + 1))
        ordered = sorted(epoch)
        assert all(b[0] == a[1] - 1 for a, b in itertools.pairwise(ordered))


@pytest.mark.case("DATA-05")
def test_labels_are_the_next_tokens() -> None:
    tokens, labels = Batches(Counting(1001), batch=8, seq=10, seed=0).rows(2, range(8))
    assert tokens.shape == labels.shape == (8, 10)
    assert tokens.dtype == labels.dtype == np.int64
    assert np.array_equal(tokens[:, 1:], labels[:, :-1])
    assert np.array_equal((tokens[:, 0] + 10) % 251, labels[:, -1])


def test_rows_are_a_pure_function_of_step_and_rows() -> None:
    documents = Counting(1001)
    batches = Batches(documents, batch=8, seq=10, seed=0)
    whole = [batches.rows(step, range(8)) for step in range(40)]  # three epochs and more
    for step in (39, 0, 12, 13, 25, 12):  # 12 and 25 cross the border of an epoch
        for rows in ([0], [5, 2], [7, 7], []):
            documents.reads.clear()
            for again in (batches, Batches(documents, batch=8, seq=10, seed=0)):
                tokens, labels = again.rows(step, rows)
                assert tokens.shape == (len(rows), 10)
                assert np.array_equal(tokens, whole[step][0][rows])
                assert np.array_equal(labels, whole[step][1][rows])
            assert len(documents.reads) == 2 * len(rows)  # nothing but these rows was read


def test_samples_run_across_the_border_of_epochs() -> None:
    n = 7
    big = Batches(Counting(n * 10 + 1), batch=30, seq=10, seed=5)  # four epochs in one batch
    small = Batches(Counting(n * 10 + 1), batch=2, seq=10, seed=5)
    order = np.concatenate([big.sample_ids(step) for step in range(7)])
    assert np.array_equal(order, np.concatenate([small.sample_ids(step) for step in range(105)]))
    epochs = order.reshape(30, n)
    assert (np.sort(epochs, axis=1) == np.arange(n)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 25  # a new order in every epoch
    assert [big.rows(0, [i])[0][0, 0] for i in range(30)] == (order[:30] * 10).tolist()


def test_the_seed_chooses_the_order() -> None:
    orders = [Batches(Counting(1001), batch=100, seq=10, seed=seed).sample_ids(0).tolist() for seed in (0, 1, -1, 0)]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] and orders[0] != orders[2] and orders[0] != list(range(100))
    unshuffled = Batches(Counting(1001), batch=100, seq=10, seed=0, shuffle=False)
    assert unshuffled.sample_ids(1).tolist() == list(range(100))


def test_rows_and_steps_that_do_not_exist() -> None:
    batches = Batches(Counting(1001), batch=8, seq=10, seed=0)
    with pytest.raises(IndexError, match=r"rows \[0, 8\] of a batch of 8"):
        batches.rows(0, [0, 8])
    with pytest.raises(IndexError, match=r"rows \[-1\] of a batch of 8"):
        batches.rows(0, [-1])
    with pytest.raises(IndexError, match="step -1: steps count from 0"):
        batches.rows(-1, [0])


@pytest.mark.case("DATA-05")
def test_documents_shorter_than_one_sequence() -> None:
    Batches(Counting(101), batch=1, seq=100, seed=0)
    with pytest.raises(DataError) as error:
        Batches(Counting(100), batch=1, seq=100, seed=0)
    assert str(error.value) == (
        "The documents are shorter than one sequence\n"
        "  - 100 tokens are available, seq = 100 needs 101; the longest sequence that works is 99"
    )
    with pytest.raises(DataError) as error:
        evaluation_batches(Counting(1), batch=1, seq=4, sequences=None)
    assert error.value.faults == ("1 tokens are available, seq = 4 needs 5; add text",)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(DataError) as error:
        Batches(Counting(100), batch=0, seq=-1, seed=0)
    assert str(error.value) == (
        "Sizes that cannot be used\n  - batch = 0: must be at least 1\n  - seq = -1: must be at least 1"
    )
    with pytest.raises(DataError, match="sequences = 0: must be at least 1"):
        evaluation_batches(Counting(100), batch=1, seq=1, sequences=0)


# ---- evaluation --------------------------------------------------------------------------------------------


@pytest.mark.case("LIFE-03")
@pytest.mark.parametrize("batch", [1, 3, 4, 10, 16])
@pytest.mark.parametrize(
    ("sequences", "windows"),
    [
        (1, [0]),
        (3, [0, 6, 13]),
        (7, [0, 2, 5, 8, 11, 14, 17]),
        (10, list(range(0, 20, 2))),
        (None, list(range(20))),
        (99, list(range(20))),
    ],
)
def test_each_sequence_counts_once_whatever_the_batch(batch: int, sequences: int | None, windows: list[int]) -> None:
    counted = len(windows)
    documents = Counting(205)
    assert validation_windows(documents, seq=10, limit=sequences) == counted
    batches = evaluation_batches(documents, batch=batch, seq=10, sequences=sequences)
    assert len(batches) == -(-counted // batch)
    pairs = [batches.rows(i, range(batch)) for i in range(len(batches))]
    assert documents.reads == [(w * 10, w * 10 + 11) for w in windows]
    tokens, labels = (np.concatenate(side) for side in zip(*pairs, strict=True))
    expected = np.add.outer(np.array(windows) * 10, np.arange(1, 11)) % 251
    assert np.array_equal(labels[:counted], expected)
    assert np.array_equal(tokens[:counted], (expected - 1) % 251)
    assert (labels[counted:] == -100).all() and (tokens[counted:] == 0).all()
    last = len(batches) - 1
    assert np.array_equal(batches.rows(last, [batch - 1])[1], pairs[last][1][-1:])
    with pytest.raises(IndexError, match=f"batch {last + 1}: there are {last + 1} batches"):
        batches.rows(last + 1, [0])


# ---- documents ---------------------------------------------------------------------------------------------


def test_any_range_equals_the_joined_text(tmp_path: Path) -> None:
    corpus = load_corpus(str(folder_of(tmp_path)))
    for documents in (corpus.train, corpus.validation):
        joined = b"".join(part.path.read_bytes() + b"\0" for part in documents.parts)
        assert len(documents) == len(joined)
        assert documents.read(0, len(joined)).tobytes() == joined
        for start in range(0, len(joined), 13):
            for length in (0, 1, 2, 17, 300):
                stop = min(start + length, len(joined))
                assert documents.read(start, stop).tobytes() == joined[start:stop]
        with pytest.raises(IndexError, match=f"of documents with {len(joined)} tokens"):
            documents.read(0, len(joined) + 1)
    assert len(Documents([])) == 0


def test_only_the_files_needed_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = load_corpus(str(folder_of(tmp_path))).train
    opened: list[Path] = []

    def spy(path: Path, mode: str) -> Any:
        opened.append(path)
        return open(path, mode)

    monkeypatch.setattr(corpus_module, "open", spy, raising=False)
    ends = np.cumsum([part.size + 1 for part in documents.parts]).tolist()
    documents.read(ends[4], ends[4] + 3)
    assert opened == [documents.parts[5].path]
    opened.clear()
    documents.read(ends[4] - 2, ends[5] + 1)  # the last byte of 4, all of 5, the first of 6
    assert opened == [part.path for part in documents.parts[4:7]]
    opened.clear()
    documents.read(ends[4] - 1, ends[4])  # a separator is in no file
    assert opened == []


def test_indexing_the_library_opens_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "open", lambda *_: pytest.fail("a file was opened"), raising=False)
    load_corpus(None)


@pytest.mark.parametrize("change", ["shrink", "grow", "rewrite", "remove"])
def test_a_file_that_changed_is_named(tmp_path: Path, change: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 1000)
    corpus = load_corpus(str(file))
    corpus.train.read(0, 10)
    title, seen = "A file of the corpus was changed during the run", "had 1000 bytes, now 1000"
    if change == "shrink":
        file.write_text("x" * 10)
        seen = "had 1000 bytes, now 10"
    elif change == "grow":
        file.write_text("x" * 1001)
        seen = "had 1000 bytes, now 1001"
    elif change == "rewrite":
        file.write_text("y" * 1000)
        os.utime(file, ns=(1, 1))
    else:
        file.unlink()
        title, seen = "A file of the corpus can no longer be read", "no such file or directory"
    with pytest.raises(DataError) as error:
        corpus.train.read(0, 5)
    assert str(error.value) == f"{title}\n  - {file}: {seen}; restore it, or start again"


# ---- corpora -----------------------------------------------------------------------------------------------


def test_the_standard_library_is_the_default() -> None:
    corpus = load_corpus(None)
    train, validation = ({part.path for part in side.parts} for side in (corpus.train, corpus.validation))
    assert len(corpus.train) + len(corpus.validation) > 5_000_000
    assert len(train) + len(validation) > 400
    assert not train & validation
    assert 0.01 < len(validation) / len(train) < 0.12
    names = {path.name for path in train | validation}
    assert {"argparse.py", "typing.py"} <= names and all(name.endswith(".py") for name in names)
    assert not {part for path in train | validation for part in path.parts} & {
        "site-packages",
        "idle_test",
        "tests",
    }
    for side in (corpus.train, corpus.validation):
        order = [part.path.as_posix() for part in side.parts]
        assert order == sorted(order)  # not the order of the disk
    assert corpus.vocab == 256
    assert corpus.train.read(0, 100_000).max() < 256 and (corpus.train.read(0, len(corpus.train)) == 0).sum() == len(
        train
    )
    assert corpus.describe().startswith(f"{corpus.name}: {len(train | validation)} files, ")
    again = load_corpus(None)
    assert again.train.parts == corpus.train.parts and again.validation.parts == corpus.validation.parts


def test_a_folder_is_split_by_path_alone(tmp_path: Path) -> None:
    first = load_corpus(str(folder_of(tmp_path / "a")))
    more = load_corpus(str(folder_of(tmp_path / "b", 200)))

    def names(documents: Documents) -> set[str]:
        return {part.path.name for part in documents.parts}

    assert names(first.train) <= names(more.train) and names(first.validation) <= names(more.validation)
    assert len(names(more.train)) + len(names(more.validation)) == 200
    assert 2 <= len(names(more.validation)) <= 20


def test_skipped_files_are_counted(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "zero.bin").write_bytes(b"a\0b")
    (tmp_path / "cut.txt").write_bytes("ä".encode()[:1])
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "long.txt").write_text("ä" * 50_000)  # its first 64 KiB are whole characters
    (tmp_path / "longer.txt").write_text("x" + "ä" * 50_000)  # and here the last one is cut
    corpus = load_corpus(str(tmp_path))
    assert corpus.skipped == {"hidden": 2, "binary": 3, "empty": 1, "no regular file": 1}
    size = sum(part.size for side in (corpus.train, corpus.validation) for part in side.parts)
    assert corpus.describe() == (
        f"{tmp_path}: 62 files, {size:,} bytes; train {len(corpus.train):,} tokens, validation "
        f"{len(corpus.validation):,} tokens; skipped 7 (3 binary, 1 empty, 2 hidden, 1 no regular file)"
    )


def test_a_file_is_split_by_position(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(bytes(range(1, 101)))
    corpus = load_corpus(str(file))
    assert corpus.train.read(0, 95).tolist() == list(range(1, 96))
    assert corpus.validation.read(0, 5).tolist() == list(range(96, 101))
    assert (len(corpus.train), len(corpus.validation)) == (95, 5)
    assert corpus.describe() == f"{file}: 1 file, 100 bytes; train 95 tokens, validation 5 tokens; skipped 0"


def test_decode(tmp_path: Path) -> None:
    corpus = load_corpus(None)
    assert corpus.decode(list("aäé\n".encode())) == "aäé\n"
    assert corpus.decode(np.array([104, 105, 300, 195])) == "hi\ufffd\ufffd"
    assert corpus.decode([]) == ""


def test_errors_of_paths(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert fails(nowhere) == (
        f"The corpus cannot be read\n  - {nowhere}: no such file or directory; give an existing path"
    )
    os.mkfifo(tmp_path / "pipe")
    assert fails(tmp_path / "pipe") == (
        f"The corpus cannot be read\n  - {tmp_path / 'pipe'}: is neither a file nor a folder; give a text file"
    )


def test_errors_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"")
    assert fails(file) == f"The corpus is empty\n  - {file}: has no bytes; give a file with text"
    file.write_bytes(b"\xff\xfe" * 100)
    assert fails(file) == f"The corpus cannot be read\n  - {file}: is not UTF-8 text; convert it"
    file.write_bytes(b"x" * 19)
    assert fails(file) == (
        f"The validation part is empty\n  - {file}: the last 5 % of 19 bytes is nothing; give at least 20 bytes"
    )
    file.write_bytes(b"x" * 20)
    assert len(load_corpus(str(file)).validation) == 1


def test_errors_of_a_folder(tmp_path: Path) -> None:
    assert fails(tmp_path) == f"The corpus is empty\n  - {tmp_path}: holds no UTF-8 text (nothing); add text files"
    (tmp_path / "b.bin").write_bytes(b"\0")
    assert fails(tmp_path) == f"The corpus is empty\n  - {tmp_path}: holds no UTF-8 text (1 binary); add text files"
    (tmp_path / "a.txt").write_text("a")
    assert fails(tmp_path) == (
        f"The validation part is empty\n  - {tmp_path}: the last 5 % of files of 1 bytes is nothing; add text"
    )


def test_a_few_files_are_split_by_position(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 100)
    corpus = load_corpus(str(tmp_path))
    assert corpus.decode(corpus.train.read(0, 192).tolist()).count("a") == 95
    assert (len(corpus.train), len(corpus.validation)) == (2 * 96, 2 * 6)


def test_unreadable_files_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by chmod: an administrator reads everything."""
    folder_of(tmp_path)
    refused = {tmp_path / "sub0" / "text3.txt", tmp_path / "sub1" / "text1.txt"}

    def guarded(path: Path, mode: str) -> Any:
        if path in refused:
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, mode)

    monkeypatch.setattr(corpus_module, "open", guarded, raising=False)
    fix = "permission denied; make it readable, or move it out of the folder"
    one, two = sorted(refused)
    assert fails(tmp_path) == f"The corpus cannot be read\n  - {one}: {fix}\n  - {two}: {fix}"
    assert fails(one) == f"The corpus cannot be read\n  - {one}: permission denied; make it readable"
