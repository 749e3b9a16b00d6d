"""Runs an example of the documentation in a process of its own, forked from the pools' server, which has loaded torch:
that takes half of the time of most examples. The module imports nothing that an example would have to import itself."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

from dtensor_lm.processes import main_only_if_importable, start_forkserver

COMMAND = "dtensor-lm"


def run_forked(words: list[str], folder: Path, seconds: float) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `dtensor-lm ...` or of a Python file in a folder; at the limit it is killed with
    all that it started."""
    start_forkserver(threads=1)
    process = multiprocessing.get_context("forkserver").Process(target=_run, args=(words, str(folder)))
    with main_only_if_importable():
        process.start()
    process.join(max(seconds, 1))
    late = process.is_alive()
    if late:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    out, err = ((folder / f".{name}").read_text() for name in ("stdout", "stderr"))
    assert process.exitcode is not None
    return process.exitcode, out, err + ("\nkilled at the limit" if late else "")


def _run(words: list[str], folder: str) -> None:
    os.setsid()
    os.chdir(folder)
    for name, number in (("stdout", 1), ("stderr", 2)):
        file = os.open(f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # more of them wait for each other
    sys.argv = [*words]
    try:
        if words[0] == COMMAND:
            from dtensor_lm.cli import main

            sys.exit(main())
        sys.path.insert(0, folder)
        runpy.run_path(os.path.join(folder, words[0]), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process ends without them, and waits for workers that they would end
