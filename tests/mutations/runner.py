"""Runs the tests of a mutation on a copy of the package and says what became of it.

killed: a named test failed, and said what the mutation expects it to say. survived: all of them passed.
crashed: something failed, but not so: a syntax error, another exception, a hang. stale: the text is not there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .mutation import Mutation, Stale

# -vvv: what tests say is not shortened.
PYTEST = ("-m", "pytest", "-x", "-vvv", "-rf", "--tb=short", "--color=no", "-p", "no:cacheprovider")
FAILED = 1  # pytest's exit code for tests that ran and failed


@dataclass(frozen=True)
class Result:
    mutation: Mutation
    status: str
    killer: str = ""
    why: str = ""  # what the killer said, or why there is none
    seconds: float = 0.0


class Runner:
    """Copies the package and its tests once, and that copy anew for every mutation: files may be edited meanwhile.

    limit: seconds that the tests of one mutation may take; then they and all that they started are killed.
    """

    def __init__(self, root: Path, package: str = "dtensor_lm", limit: float = 120.0) -> None:
        self.package, self.limit = package, limit
        self.folder = tempfile.TemporaryDirectory(prefix="mutations-")
        self.clean = Path(self.folder.name).resolve() / "clean"
        for name in (package, "tests"):
            shutil.copytree(root / name, self.clean / name)
        if (root / "pyproject.toml").exists():
            shutil.copy2(root / "pyproject.toml", self.clean)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.cleanup()

    def check_import(self) -> None:
        """Raises RuntimeError unless Python, started as the tests are, imports the copy."""
        _, output = self._python(self.clean, ["-c", f"import {self.package}; print({self.package}.__file__)"], 60)
        if not output.startswith(str(self.clean) + os.sep):
            raise RuntimeError(f"{self.package} is not imported from the copy {self.clean}: {output}")

    def unmutated(self, mutations: Sequence[Mutation]) -> str:
        """Runs the tests of all mutations on the package as it is. Returns what failed, '' if nothing did."""
        tests = dict.fromkeys(test for m in mutations for test in m.tests)
        code, output = self._python(self.clean, [*PYTEST, *tests], self.limit + 20 * len(tests))
        return "" if code == 0 else output

    def run(self, mutation: Mutation) -> Result:
        start = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix="mutated-", dir=self.clean.parent))
        try:
            status, killer, why = self._status(mutation, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Result(mutation, status, killer, why, time.perf_counter() - start)

    def _status(self, m: Mutation, folder: Path) -> tuple[str, str, str]:
        shutil.copytree(self.clean, folder, dirs_exist_ok=True)  # with times, so that compiled files stay valid
        try:
            m.apply(folder / self.package)
        except Stale as error:
            return "stale", "", str(error)
        compiled = importlib.util.cache_from_source(str(folder / self.package / m.file))
        Path(compiled).unlink(missing_ok=True)
        code, output = self._python(folder, [*PYTEST, *m.tests], self.limit)
        if code == 0:
            return "survived", "", ""
        if code is None:
            return "crashed", "", f"not done after {self.limit:g} s"
        killer, said = failed_test(output, m.tests), failure_text(output)
        if code != FAILED or not killer:
            return "crashed", "", f"pytest ended with {code}\n{output}"
        if not re.search(m.sees, said):
            return "crashed", "", f"{killer} failed but did not say {m.sees!r}:\n{said}"
        return "killed", killer, said

    def _python(self, folder: Path, arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Exit code (None at the limit) and output of Python in a copy, which it imports the package from."""
        # One thread: the tensors are tiny, and threads that spin beside a busy machine cost most of the time.
        env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        for name in ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
            env.pop(name, None)
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):  # the whole group: workers too, also at Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def failed_test(output: str, tests: Sequence[str]) -> str:
    """The node id in pytest's short summary if it is one of these tests, or one of a function's parameters; else ''."""
    for line in output.splitlines():
        found = line.removeprefix("FAILED ")
        for test in tests if found != line else ():
            if found == test or found.startswith(f"{test} - "):  # ids may have spaces and dashes in their brackets
                return test
            if found.startswith(f"{test}["):
                return found.partition(" - ")[0]
    return ""


def failure_text(output: str) -> str:
    """What the failing test said: lines of the exception, without the source that a traceback shows."""
    return "\n".join(line[1:].strip() for line in output.splitlines() if re.match(r"E\s", line))
