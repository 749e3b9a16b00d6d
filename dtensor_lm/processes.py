"""What all worker processes need: thread counts, the watch over the parent, failures.

Used by `launch` (the ranks of a run) and by `testing.workers` (the pool of tests and checks). Imports no
torch: the variables set here count only if they are set before torch loads its OpenMP library.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from dtensor_lm.errors import UserError

# Imported once by the fork server, so that a worker starts in milliseconds instead of seconds.
PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.elastic.multiprocessing",
)

# What a peer of a failed rank sees; never the cause when there is any other failure.
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|lost)|broken pipe|socket (closed|timeout)|pair closure"
    r"|timed out waiting \d+ms for (recv|send)|read timeout|remote process exited",
    re.IGNORECASE,
)
_PR_SET_PDEATHSIG = 1
# How long workers may take to end after one of them failed.
GRACE_AFTER_FAILURE_SECONDS = 5.0
# A process in an uninterruptible system call survives SIGKILL; the launcher does not wait for it for ever.
_LAST_WAIT_SECONDS = 5.0


def available_cores() -> int:
    """Cores this process may use (its affinity, where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that give one process `threads` threads, none of which spins while it waits.

    A spinning thread of one rank takes the core on which another should finish the collective.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",  # libgomp
        "KMP_BLOCKTIME": "0",  # libiomp
    }


@contextlib.contextmanager
def defaults_in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that are not set yet, and remove them again afterwards."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def start_forkserver(threads: int) -> None:
    """Start the fork server with torch preloaded; at once again when it runs already.

    It returns before torch is loaded, so a caller that imports torch next does so at the same time.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    with main_only_if_importable(), defaults_in_environment(thread_environment(threads)):
        forkserver.ensure_running()


def main_can_be_imported() -> bool:
    """Whether a worker can import what `__main__` defines: not from stdin, `-c` or a notebook."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")


@contextlib.contextmanager
def main_only_if_importable() -> Iterator[None]:
    """Around a start of workers, which import `__main__` by its path; on stdin that is '<stdin>'."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is None or main_can_be_imported():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = path


def check_importable(fn: Callable[..., object]) -> None:
    """Refuse a function that no worker could import.

    Raises:
        ValueError: It is defined in a program that has no file.
    """
    if getattr(fn, "__module__", None) == "__main__" and not main_can_be_imported():
        name = getattr(fn, "__qualname__", repr(fn))
        raise ValueError(
            f"{name} is defined in a program without a file (stdin, -c or a notebook), "
            "which workers cannot import; put it into a module"
        )


def exit_with_parent() -> None:
    """Let this worker die with the process that started it, even when that one is killed with SIGKILL.

    A thread waits for the parent's end of a pipe to close. On Linux the kernel also kills the worker when the
    fork server ends (it ends with the parent): that works even while the worker holds the interpreter lock.
    """
    parent = multiprocessing.parent_process()
    if parent is None:  # started by another launcher, which looks after its own
        return
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def exit_text(code: int | None) -> str:
    """How a process ended, for people: 'killed by SIGKILL', 'exit code 3'."""
    if code is None:
        return "no exit code"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Attributes:
        rank: The rank that failed.
        seconds: When, by `time.monotonic()`, which all processes of a machine share.
        message: One line: the exception, or how the process died.
        text: The traceback; empty for a process that died without one.
        user_error: The pickled `UserError` if it was one.
    """

    rank: int
    seconds: float
    message: str
    text: str = ""
    user_error: bytes | None = None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure of `rank` by `error`, whose traceback starts below the worker's own frame."""
        seconds = time.monotonic()
        below = error.__traceback__.tb_next if error.__traceback__ else None
        if below is not None:
            error = error.with_traceback(below)
        text = "".join(traceback.format_exception(error)).rstrip()
        message = traceback.format_exception_only(error)[-1].strip()
        pickled = None
        if isinstance(error, UserError):
            with contextlib.suppress(Exception):
                pickled = pickle.dumps(error)
        return cls(rank, seconds, message, text, pickled)

    @property
    def lost_connection(self) -> bool:
        """Whether this rank only saw that another one had gone."""
        return self.user_error is None and bool(_LOST_CONNECTION.search(self.message))

    def report(self, world: int) -> str:
        """Several lines: the rank, then its own traceback."""
        head = f"rank {self.rank} of {world} failed: "
        return f"{head}{self.message}\n{self.text}" if self.text else f"{head}{self.message}"

    def raise_user_error(self) -> None:
        """Raise the `UserError` this failure was, if it was one."""
        if self.user_error is not None:
            raise pickle.loads(self.user_error)


def by_cause(failures: Iterable[Failure]) -> list[Failure]:
    """The failures, the likely cause first: own errors before lost connections, then by time."""
    return sorted(failures, key=lambda failure: (failure.lost_connection, failure.seconds))


def report(failures: Iterable[Failure], world: int) -> str:
    """The first cause with its traceback, one line for every other own error, and the first cause again."""
    first, *others = by_cause(failures)
    own = [other for other in others if not other.lost_connection]
    lines = [first.report(world), *(f"rank {other.rank} failed later: {other.message}" for other in own)]
    if own:
        lines.append(f"rank {first.rank} of {world} failed first: {first.message}")
    return "\n".join(lines)


class Keeper(threading.Thread):
    """Kills workers that do not end: the elastic launcher alone would wait 30 s for each step of a shutdown.

    Workers report `(event, rank, process)` over a pipe. It holds a handle of every process, not its number,
    which the system may give to another one.

    Attributes:
        ended: When each rank ended, by `time.monotonic()`.
    """

    def __init__(self, reader: Connection) -> None:
        super().__init__(name="keeper", daemon=True)
        self.ended: dict[int, float] = {}
        self._reader = reader
        self._done: set[int] = set()
        self._handles: dict[int, int] = {}

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._reader, select.POLLIN)
        deadline: float | None = None
        stopped_at: float | None = None
        while stopped_at is None or (self._handles and time.monotonic() < stopped_at + _LAST_WAIT_SECONDS):
            wait = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            for handle, _ in poller.poll(wait):
                if handle in self._handles:
                    poller.unregister(handle)
                    os.close(handle)
                    rank = self._handles.pop(handle)
                    self.ended[rank] = time.monotonic()
                    if rank not in self._done and deadline is None:
                        deadline = time.monotonic() + GRACE_AFTER_FAILURE_SECONDS
                    continue
                event, rank, process = self._reader.recv()
                if event == "start" and hasattr(os, "pidfd_open"):
                    with contextlib.suppress(OSError):  # ended already, or a system without handles
                        opened = os.pidfd_open(process)
                        self._handles[opened] = rank
                        poller.register(opened, select.POLLIN)
                elif event == "done":
                    self._done.add(rank)
                elif event == "stop":
                    stopped_at = deadline = time.monotonic()
            if deadline is not None and time.monotonic() >= deadline:
                for handle in self._handles:
                    with contextlib.suppress(OSError):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                deadline = time.monotonic() + 1.0  # again for one that started meanwhile
