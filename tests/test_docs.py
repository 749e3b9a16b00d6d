"""The examples of the documentation run, and show what they show.

Every ```python block of README.md, CONTRIBUTING.md and docs/*.md runs alone, in a process and a folder of its
own. Of a ```console block the commands `$ dtensor-lm ...` run. The first block of each kind in README.md is run by a
shell; the others by processes that are forked from one with torch, as starting Python would take most of their time.
Comments directly before a block say more:

    <!-- exit 2 -->         its last command ends with this code; 0 otherwise
    <!-- output -->         what stands after the command is its output; before a ```text block: this is the
                            output of the python block above. Numbers may differ; `...` in a line is
                            any text, alone it is any lines
    <!-- exact output -->   the same, and numbers are equal too
    <!-- file NAME -->      the block is a file that the commands of the same document find in their folder
    <!-- not run: WHY -->   the block needs what a test does not have
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from example_process import COMMAND, run_forked

ROOT = Path(__file__).parent.parent
WALL_SECONDS = 300  # of one block
_NOTE = re.compile(r"<!-- (?:(exit) (\d+)|((?:exact )?output)|(file) ([\w.-]+)|(not run): (.+?)) -->\Z")
_NUMBER = re.compile(r"[-+]?\d[\d_,]*(\.\d+)?(e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block: the line it starts at, its language, its text, and what comments before it say."""

    document: str
    line: int
    language: str
    text: str
    notes: dict[str, str]
    by_shell: bool = False  # an interpreter of its own, and the command that is installed

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: str, text: str) -> list[Block]:
    found: list[Block] = []
    notes: dict[str, str] = {}
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        if line.startswith("```"):
            body: list[str] = []
            for _, inner in lines:
                if inner.startswith("```"):
                    break
                body.append(inner)
            else:
                raise ValueError(f"{document}:{number}: this block has no end")
            found.append(Block(document, number, line[3:].strip(), "".join(f"{x}\n" for x in body), notes))
            notes = {}
        elif match := _NOTE.match(line.strip()):
            words = [word for word in match.groups() if word]
            notes[words[0]] = words[-1]
        elif re.match(r"<!-- ?(exit|exact|output|file|not run)", line.strip()):
            raise ValueError(f"{document}:{number}: {line.strip()} is not a note that is known")
        elif line.strip():
            notes = {}
    return found


def commands(block: Block) -> list[tuple[str, str]]:
    """(command, text shown after it) of a console block; a backslash continues a command."""
    found: list[tuple[str, str]] = []
    for line in block.text.replace("\\\n", "").splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].strip(), ""))
        elif found:
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def shows(block: Block) -> str | None:
    return next((note for note in ("output", "exact output") if note in block.notes), None)


def matches(expected: str, real: str, exact: bool) -> bool:
    """Whether output is what the document shows; widths of blanks may differ, as they follow from numbers."""

    def plain(text: str) -> list[str]:
        lines = [" ".join(line.split()) for line in text.strip().splitlines()]
        return lines if exact else [_NUMBER.sub("#", line) for line in lines]

    def pattern(line: str) -> str:
        return r"(.*\n)*" if line == "..." else re.escape(line).replace(re.escape("..."), ".*") + r"\n"

    wanted = "".join(map(pattern, plain(expected)))
    return re.fullmatch(wanted, "".join(f"{line}\n" for line in plain(real))) is not None


def run(command: str, folder: Path, seconds: float) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; at the limit everything that the command started is killed."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.setdefault("OMP_NUM_THREADS", "1")  # more of them wait for each other where other tests run too
    process = subprocess.Popen(
        command, shell=True, cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += f"\nkilled at the limit of {WALL_SECONDS} seconds"
    return process.returncode, out, err


def check(block: Block, following: Block | None, files: dict[str, str], folder: Path) -> None:
    """Runs a python or console block; raises AssertionError where it does not do what the document says."""
    for name, text in files.items():
        (folder / name).write_text(text)
    wanted = int(block.notes.get("exit", 0))
    if block.language == "python":
        (folder / "example.py").write_text(block.text)
        shown = following if following and following.language == "text" and shows(following) else None
        todo = [(f"{shlex.quote(sys.executable)} example.py", shown.text if shown else "")]
        note = shows(shown) if shown else None
    else:
        todo = [(c, text) for c, text in commands(block) if c.startswith(COMMAND)]
        note = shows(block)
    end = time.monotonic() + WALL_SECONDS
    for place, (command, expected) in enumerate(todo, 1):
        if block.by_shell:
            code, out, err = run(command, folder, end - time.monotonic())
        else:
            words = ["example.py"] if block.language == "python" else shlex.split(command)
            code, out, err = run_forked(words, folder, end - time.monotonic())
        report = f"{block}: {command}\nexit {code}\n{out}\n{err}"
        assert code == (wanted if place == len(todo) else 0), report
        real = out + (err if code else "")  # libraries may warn on stderr
        same = note is None or matches(expected, real, note == "exact output")
        assert same, f"{report}\nbut the document shows:\n{expected}"


def documents() -> list[Path]:
    named = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [path for path in named if path.exists()]


def examples() -> list[Any]:
    found = []
    for path in documents():
        every = blocks(str(path.relative_to(ROOT)), path.read_text())
        files = {block.notes["file"]: block.text for block in every if "file" in block.notes}
        kinds = {"python", "console"}
        for block, following in itertools.zip_longest(every, every[1:]):
            if block.language in ("python", "console") and not block.notes.keys() & {"not run", "file"}:
                by_shell = path.name == "README.md" and block.language in kinds
                kinds -= {block.language}
                found.append(pytest.param(replace(block, by_shell=by_shell), following, files, id=str(block)))
    return found


@pytest.mark.timeout(WALL_SECONDS + 60)
@pytest.mark.parametrize(("block", "following", "files"), examples())
def test_examples(block: Block, following: Block | None, files: dict[str, str], tmp_path: Path) -> None:
    check(block, following, files, tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_point_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    missing = [x for x in targets if "://" not in x and not (path.parent / x).exists()]
    assert not missing


# The checks above see what is wrong


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```python\nprint(1 / 0)\n```\n", "ZeroDivisionError"),
        ("```python\nprint('loss 1.25')\n```\n<!-- output -->\n```text\nloss 7\n```\n", None),
        ("```python\nprint('loss 1')\n```\n<!-- exact output -->\n```text\nloss 7\n```\n", "document shows"),
        ("```python\nprint('a\\nb\\nc')\n```\n<!-- output -->\n\n```text\na\n...\nc\n```\n", None),
        ("```python\nprint('a b c')\n```\n<!-- output -->\n```text\na ... c\n```\n", None),
        ("```python\nprint('a\\nb c')\n```\n<!-- output -->\n```text\na ... c\n```\n", "document shows"),
        ("```python\nprint('a\\nb\\nc')\n```\n<!-- output -->\n```text\na\nc\n```\n", "document shows"),
        ("<!-- file x.txt -->\n```text\n7\n```\n```python\nassert open('x.txt').read() == '7\\n'\n```", None),
        ("```console\n$ dtensor-lm tra\\\nin --sed 1\n```\n", "unknown option"),
        ("<!-- exit 2 -->\n```console\n$ false\n$ dtensor-lm train --sed 1\nanything\n```\n", None),
        (
            "<!-- exit 2 -->\n<!-- output -->\n```console\n$ dtensor-lm train --seeed 1\n"
            "error: these options cannot be used\n  - --seeed: unknown option (did you mean --seed?)\n```\n",
            None,
        ),
        ("<!-- exit 2 -->\nBetween.\n```console\n$ dtensor-lm train --sed 1\n```\n", "exit 2"),
    ],
)  # fmt: skip
def test_a_wrong_example_is_seen(text: str, fault: str | None, tmp_path: Path) -> None:
    every = blocks("x.md", text)
    files = {block.notes["file"]: block.text for block in every if "file" in block.notes}
    place = next(i for i, block in enumerate(every) if block.language in ("python", "console"))
    following = every[place + 1] if place + 1 < len(every) else None
    if fault is None:
        check(every[place], following, files, tmp_path)
    else:
        with pytest.raises(AssertionError, match=re.escape(fault)):
            check(every[place], following, files, tmp_path)


@pytest.mark.quick
def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    start = time.monotonic()
    code, _, err = run("sleep 60 & sleep 60", tmp_path, 1)
    assert code == -signal.SIGKILL and "killed at the limit" in err and time.monotonic() - start < 20


@pytest.mark.quick
@pytest.mark.parametrize("text", ["```python\nprint(1)\n", "<!-- exit two -->\n```python\n```\n"])
def test_a_block_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"x\.md:1: "):
        blocks("x.md", text)
