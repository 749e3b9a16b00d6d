"""Start the ranks of a run: as torchrun or Slurm started them, in this process, or as local workers.

Local workers come from torch's elastic launcher (no restarts) and a fork server that has loaded torch. What
is added here: nothing outlives a failure by more than seconds, and what is shown is the cause.

| end of the run | exit code |
|---|---|
| `fn` returned an int (on rank 0) / None | that / 0 |
| a rank raised or died | 1 |
| a rank raised a `UserError` | raised again here, once, for the caller to show (2 by convention) |
| SIGTERM, Ctrl-C | 143, 130 |

torch is imported inside functions only: `prepare_environment` has to come first.
"""

from __future__ import annotations

import dataclasses
import json as json_format
import logging
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from dtensor_lm.errors import ConfigError
from dtensor_lm.processes import (
    Failure,
    Keeper,
    available_cores,
    by_cause,
    check_importable,
    exit_text,
    exit_with_parent,
    main_only_if_importable,
    report,
    start_forkserver,
    thread_environment,
)

# How long workers may take to end after a signal to the launcher.
GRACE_AFTER_SIGNAL_SECONDS = 8
# A rank that only lost a connection ends this much later, so that the launcher sees the cause first.
_LOST_CONNECTION_SECONDS = 1.0
_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ENDED_BY_SIGNAL = {sign: 128 + number for number in _SIGNALS for sign in (-number, 128 + number)}


def launch(
    fn: Callable[[Any], int | None], argument: Any, world: int, *, mesh_text: str = "", json: bool = False
) -> int:
    """Run `fn(argument)` on `world` ranks.

    Args:
        fn: A module-level function; `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and the rendezvous are in its
            environment (not when it is the only process). It starts and leaves the process group itself.
        argument: Picklable.
        world: The number of processes the mesh needs.
        mesh_text: The mesh as the user wrote it, for the error.
        json: Show the failure of a worker as one JSON object on stdout too.

    Returns:
        The exit code.

    Raises:
        ConfigError: The launcher started another number of processes, or left out how they find each other.
        UserError: The one that a worker raised.
    """
    given = launcher_environment(os.environ)
    if given is not None:
        _check_given(given, world, mesh_text)
        os.environ.update(given)
        return _exit_code(fn(argument))
    if world == 1:
        return _exit_code(fn(argument))
    return _launch_here(fn, argument, world, json)


def prepare_environment(world: int) -> None:
    """Set the threads of each rank, without spinning; before torch is imported. What is set stays."""
    if os.environ.get("SLURM_CPUS_PER_TASK", "").isdecimal():
        threads = int(os.environ["SLURM_CPUS_PER_TASK"])
    else:
        here = os.environ.get("LOCAL_WORLD_SIZE", "")
        threads = available_cores() // max(1, int(here) if here.isdecimal() else world)
    for name, value in thread_environment(max(1, threads)).items():
        os.environ.setdefault(name, value)


def launcher_environment(environment: Mapping[str, str]) -> dict[str, str] | None:
    """The variables torch reads, as torchrun or Slurm gave them; None without a launcher."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {name: environment[name] for name in names if name in environment}
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))
    if "SLURM_PROCID" not in environment or int(tasks) < 2:
        return None
    given = {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": tasks}
    given["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    hosts = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
    given["MASTER_ADDR"] = environment.get("MASTER_ADDR", hosts or "127.0.0.1")
    # One port per job, below the range that systems hand out on their own (from 32768).
    port = 10_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000
    given["MASTER_PORT"] = environment.get("MASTER_PORT", str(port))
    return given


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form: 'node[003-005,9]-ib,login' is 'node003-ib'; '' of ''."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group()) if first else ""


def _check_given(given: Mapping[str, str], world: int, mesh_text: str) -> None:
    faults = []
    wrong = [f"{name}={given[name]!r}" for name in ("RANK", "WORLD_SIZE") if not given[name].isdecimal()]
    if wrong:
        raise ConfigError("the processes do not fit the mesh", [f"{' and '.join(wrong)}: expected a number"])
    started = int(given["WORLD_SIZE"])
    if int(given["RANK"]) >= started:
        faults.append(f"RANK={given['RANK']} of WORLD_SIZE={started}: ranks count from 0")
    if started != world:
        mesh = f"the mesh {mesh_text} needs" if mesh_text else "the mesh needs"
        processes = "1 process" if world == 1 else f"{world} processes"
        faults.append(
            f"{mesh} {processes}, the launcher started {started} (WORLD_SIZE): start {world} "
            f"(torchrun --nproc-per-node={world}) or give a mesh whose sizes multiply to {started}"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]
    if missing and started > 1:
        faults.append(f"RANK and WORLD_SIZE are set, {' and '.join(missing)} not: start with torchrun, or set it")
    if faults:
        raise ConfigError("the processes do not fit the mesh", faults)


def rank_threads() -> int:
    """OMP_NUM_THREADS, which may be a list with one number per level of nesting."""
    return int(os.environ["OMP_NUM_THREADS"].partition(",")[0])


def _exit_code(result: int | None) -> int:
    return int(result) if isinstance(result, int) else 0


def _launch_here(fn: Callable[[Any], int | None], argument: Any, world: int, json: bool) -> int:
    check_importable(fn)
    prepare_environment(world)
    start_forkserver(rank_threads())  # it loads torch while this process does the same

    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    folder = tempfile.mkdtemp(prefix="dtensor-lm-run-")
    reader, writer = multiprocessing.get_context("forkserver").Pipe(duplex=False)
    keeper = Keeper(reader)
    keeper.start()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        config = _elastic_config(world, folder)
        with main_only_if_importable():
            results = elastic_launch(config, _run_rank)(fn, argument, folder, writer)
        return _exit_code(results[0])
    except KeyboardInterrupt:  # before the elastic launcher handles signals itself
        return 130
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        failures = _failures(folder, codes, keeper.ended)
        if not failures:
            rank, code = next(iter(codes.items()))
            if code != -signal.SIGINT:  # Ctrl-C reaches workers too, and needs no explanation
                print(f"rank {rank} of {world} ended: {exit_text(code)}", file=sys.stderr, flush=True)
            return _ENDED_BY_SIGNAL[code]
        by_cause(failures)[0].raise_user_error()
        _show(failures, world, json)
        return 1
    finally:
        writer.send(("stop", 0, 0))
        keeper.join()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        shutil.rmtree(folder, ignore_errors=True)


def _elastic_config(world: int, folder: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    if "LOGLEVEL" not in os.environ:  # the variable with which torch lets users ask for these
        for name in list(logging.root.manager.loggerDict):
            if name.startswith(_LOGGERS):
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": world,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "local_addr": "127.0.0.1",
        "start_method": "forkserver",
        "max_restarts": 0,
        "monitor_interval": 0.05,
        "logs_specs": DefaultLogsSpecs(log_dir=folder),
        "signals_to_handle": ",".join(number.name for number in _SIGNALS),
        "shutdown_timeout": GRACE_AFTER_SIGNAL_SECONDS,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # they differ between versions of torch
    return LaunchConfig(**{name: value for name, value in options.items() if name in known})


def _run_rank(fn: Callable[[Any], int | None], argument: Any, folder: str, writer: Connection) -> int | None:
    """The life of a local worker."""
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once, also inside a collective
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    rank = int(os.environ["RANK"])
    writer.send(("start", rank, os.getpid()))

    import torch

    torch.set_num_threads(rank_threads())
    try:
        result = fn(argument)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code in _ENDED_BY_SIGNAL:
            _leave(error.code)
        failure = Failure.of(rank, error)
        path = os.path.join(folder, f"failure-{rank}")
        with open(f"{path}.new", "wb") as file:
            pickle.dump(failure, file)
        os.replace(f"{path}.new", path)
        if failure.lost_connection:
            time.sleep(_LOST_CONNECTION_SECONDS)
        _leave(1)
    writer.send(("done", rank, os.getpid()))
    return result if isinstance(result, int) else None


def _leave(code: int) -> None:
    """End at once: the normal end of Python can wait for collectives that will never finish."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _failures(folder: str, codes: Mapping[int, int], ended: Mapping[int, float]) -> list[Failure]:
    """What the ranks wrote down before they ended, and the ranks that ended without."""
    failures = {}
    for name in os.listdir(folder):
        if re.fullmatch(r"failure-\d+", name):
            with open(os.path.join(folder, name), "rb") as file:
                failure = pickle.load(file)
            failures[failure.rank] = failure
    for rank, code in codes.items():
        if rank not in failures and code not in _ENDED_BY_SIGNAL:
            message = f"the process died ({exit_text(code)})"
            failures[rank] = Failure(rank, ended.get(rank, time.monotonic()), message)
    return list(failures.values())


def _show(failures: list[Failure], world: int, json: bool) -> None:
    print(report(failures, world), file=sys.stderr, flush=True)
    if json:
        first = by_cause(failures)[0]
        error = {"rank": first.rank, "world": world, "message": first.message, "traceback": first.text}
        print(json_format.dumps({"error": error}), flush=True)
