"""A pool of gloo workers on this machine, for tests, for `check` and for trying things out.

    def total() -> float:
        value = torch.tensor(float(torch.distributed.get_rank()))
        torch.distributed.all_reduce(value)
        return value.item()

    pool(4).run(total)  # [6.0, 6.0, 6.0, 6.0]

The workers are real processes and are kept between calls. They start from a fork server that has loaded
torch, so a new set takes tenths of a second. After any failure the set is killed; the next call starts one.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from dtensor_lm.processes import (
    Failure,
    available_cores,
    by_cause,
    check_importable,
    exit_text,
    exit_with_parent,
    main_only_if_importable,
    report,
    start_forkserver,
)

# After a failure: how long to wait for a better one. Longer while only lost connections were seen, because
# peers can notice a death before the parent does.
_GRACE_SECONDS = 0.2
_GRACE_SECONDS_LOST_CONNECTION = 2.0
# Every group holds sockets and threads in each worker; a set with more groups than this is replaced.
_GROUPS_PER_SET = 100
_STACK_SECONDS = 0.5


class WorkerError(RuntimeError):
    """A task failed on a worker: the first rank that failed, with its own traceback."""


@dataclass(frozen=True)
class _Answer:
    """What a worker sends back. `result` is pickled; `groups` is None when the default group is gone."""

    result: bytes | None
    failure: Failure | None
    groups: int | None


class WorkerPool:
    """`world` gloo workers, started at the first `run` and again after a failure."""

    def __init__(self, world: int) -> None:
        if world < 1:
            raise ValueError(f"a pool needs at least one worker, got world={world}")
        self.world = world
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder = ""

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank.

        Args:
            fn: A module-level function; it finds its rank with `torch.distributed.get_rank()`.
            timeout: Seconds for the whole task, without the start of the workers.

        Returns:
            The results by rank. Tensors arrive as copies.

        Raises:
            UserError: The one that was raised on a rank.
            WorkerError: A rank raised, died or did not finish in time.
            ValueError: `fn` is defined where workers cannot import it.
        """
        check_importable(fn)
        task = pickle.dumps((fn, args, kwargs))
        try:
            self._start()
            for connection in self._connections:
                with contextlib.suppress(OSError):  # a worker that died in between is found by _collect
                    connection.send((os.getcwd(), sys.path, task))
            answers = self._collect(timeout)
            results = [pickle.loads(answer.result or b"") for answer in answers]
        except BaseException:
            self.stop()
            raise
        if any(answer.groups is None or answer.groups > _GROUPS_PER_SET for answer in answers):
            self.stop()
        return results

    def stop(self) -> None:
        """Kill the workers; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            connection.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections, self._folder = [], [], ""

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.stop()
        start_forkserver(threads=max(1, available_cores() // self.world))
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.mkdtemp(prefix="dtensor-lm-workers-")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, self._folder, theirs)
            process = context.Process(target=_serve, args=arguments, name=f"rank-{rank}")
            with main_only_if_importable():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect(120.0)  # the first start loads torch, which can take long on a busy machine

    def _collect(self, timeout: float) -> list[_Answer]:
        """One answer of every rank; raises as `run` says."""
        answers: dict[int, _Answer] = {}
        failures: dict[int, Failure] = {}
        end = time.monotonic() + timeout
        while len(answers.keys() | failures.keys()) < self.world:
            now = time.monotonic()
            if failures:
                first = by_cause(failures.values())[0]
                grace = _GRACE_SECONDS_LOST_CONNECTION if first.lost_connection else _GRACE_SECONDS
                end = min(end, first.seconds + grace)
            if now >= end:
                break
            open_ranks = [rank for rank in range(self.world) if rank not in answers and rank not in failures]
            waiting: dict[Any, int] = {}
            for rank in open_ranks:
                waiting[self._connections[rank]] = rank
                waiting[self._processes[rank].sentinel] = rank
            ready = multiprocessing.connection.wait(list(waiting), end - now)
            for rank in sorted({waiting[item] for item in ready}):
                answer = self._receive(rank)
                if isinstance(answer, Failure):
                    failures[rank] = answer
                elif answer.failure is not None:
                    failures[rank] = answer.failure
                else:
                    answers[rank] = answer
        if failures:
            by_cause(failures.values())[0].raise_user_error()
            raise WorkerError(report(failures.values(), self.world))
        if len(answers) < self.world:
            raise WorkerError(self._timed_out(timeout, sorted(set(range(self.world)) - answers.keys())))
        return [answers[rank] for rank in range(self.world)]

    def _receive(self, rank: int) -> _Answer | Failure:
        try:
            if self._connections[rank].poll():
                return self._connections[rank].recv()
        except (EOFError, OSError):
            pass
        process = self._processes[rank]
        process.join(5)
        return Failure(rank, time.monotonic(), f"the process died ({exit_text(process.exitcode)})")

    def _timed_out(self, timeout: float, ranks: list[int]) -> str:
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        lines = [f"timed out after {timeout:g} s; unfinished: {', '.join(f'rank {rank}' for rank in ranks)}"]
        end = time.monotonic() + _STACK_SECONDS
        for rank in ranks:
            stack = _stack(self._folder, rank)
            while not stack and time.monotonic() < end:
                time.sleep(0.02)
                stack = _stack(self._folder, rank)
            lines += [f"rank {rank} of {self.world} is at:", stack or "  (it does not react)"]
        return "\n".join(lines)


def _stack(folder: str, rank: int) -> str:
    try:
        with open(os.path.join(folder, f"stack-{rank}")) as file:
            text = file.read()
    except OSError:
        return ""
    return text.rstrip() if text.endswith("\n") else ""


def _serve(rank: int, world: int, folder: str, connection: Connection) -> None:
    """The life of a worker: join the group, then answer one task after another."""
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which kills the workers
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    stacks = open(os.path.join(folder, f"stack-{rank}"), "w")  # noqa: SIM115 (open as long as the worker lives)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, available_cores() // world))
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    except Exception as error:
        connection.send(_Answer(None, Failure.of(rank, error), None))
        return
    connection.send(_Answer(pickle.dumps(None), None, 1))
    while True:
        try:
            folder_of_caller, path, task = connection.recv()
        except EOFError:
            return
        connection.send(_answer(rank, folder_of_caller, path, task))


def _answer(rank: int, folder: str, path: list[str], task: bytes) -> _Answer:
    import torch.distributed as dist

    try:
        with contextlib.suppress(OSError):  # a caller whose directory was removed
            os.chdir(folder)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        fn, args, kwargs = pickle.loads(task)
        result = pickle.dumps(fn(*args, **kwargs))
        failure = None
    except BaseException as error:  # sys.exit in a task is a failure of the task, not the end of the worker
        result, failure = None, Failure.of(rank, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else None
    return _Answer(result, failure, groups)


_pools: dict[int, WorkerPool] = {}


def pool(world: int) -> WorkerPool:
    """The pool of `world` workers of this process; always the same one."""
    if world not in _pools:
        _pools[world] = WorkerPool(world)
    return _pools[world]


def shutdown() -> None:
    """Kill the workers of every pool."""
    for each in _pools.values():
        each.stop()


# Registered after multiprocessing's own exit function, so it runs before that one waits for the workers.
atexit.register(shutdown)
