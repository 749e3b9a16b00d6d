"""Starting the ranks of a run: real processes, every way a run can end, and what is left afterwards."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from dtensor_lm.errors import ConfigError
from dtensor_lm.launch import first_host, launch, launcher_environment, prepare_environment

pytestmark = [pytest.mark.timeout(90), pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

_SCRIPT = """
import os, signal, sys, time
from dtensor_lm import launch as launching
from dtensor_lm.errors import ConfigError, UserError
from dtensor_lm.launch import launch

launching.GRACE_AFTER_SIGNAL_SECONDS = 2  # instead of 8: the time of workers that ignore SIGTERM

def work(how: str):
    import torch, torch.distributed as dist
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    if how.startswith("ignore") or how == "one-ignores-sleep" and rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, f"worker {os.getpid()} {os.environ['MASTER_PORT']} {torch.get_num_threads()}\\n".encode())
    if rank == 1:
        if how.endswith("raise"):
            raise RuntimeError("loader broke")
        if how == "user":
            raise ConfigError("bad options", ["this", "that"])
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(7)
    if how.endswith("sleep"):
        time.sleep(600)
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    return 10 + int(value.item()) if how == "number" else None

if __name__ == "__main__":
    for how in sys.argv[1].split(","):
        began = time.monotonic()
        try:
            code = launch(work, how, int(sys.argv[2]), mesh_text="fsdp=3", json=how == "raise")
        except UserError as error:
            print(error, file=sys.stderr)
            code = 2
        seconds = time.monotonic() - began
        if "," in sys.argv[1]:
            for file in sys.stdout, sys.stderr:
                print(f"== {how} {code} {seconds}", file=file, flush=True)
    sys.exit(code)
"""


class Run:
    """A launcher in a process of its own."""

    def __init__(self, folder: Path, how: str, world: int) -> None:
        script = folder / "script.py"
        script.write_text(_SCRIPT)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "SLURM_"))}
        self.launcher = subprocess.Popen(
            [sys.executable, str(script), how, str(world)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean,
        )  # fmt: skip
        self.workers: list[int] = []
        self.port = 0

    def wait_for_workers(self, count: int) -> Run:
        assert self.launcher.stdout is not None
        for _ in range(count):
            _, process, port, _ = self.launcher.stdout.readline().split()
            self.workers.append(int(process))
            self.port = int(port)
        return self

    def end(self, seconds: float) -> tuple[int, list[str], str]:
        """Exit code, lines of stdout, stderr."""
        out, err = self.launcher.communicate(timeout=seconds)
        return self.launcher.returncode, out.splitlines(), err

    def left_after(self, seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        while (left := [each for each in self.workers if alive(each)]) and time.monotonic() < end:
            time.sleep(0.05)
        return left


def alive(process: int) -> bool:
    """Whether the process runs; one that ended and was not reaped yet (state Z) does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listens(port: int) -> bool:
    """Whether any socket of the machine listens on the port (state 0A)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def test_rank_0_gives_the_exit_code_and_the_cores_are_shared(tmp_path: Path) -> None:
    code, lines, err = Run(tmp_path, "number", 3).end(60)
    assert (code, err) == (13, "")
    assert len(lines) == 3
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert {int(line.split()[3]) for line in lines} == {threads}


@dataclasses.dataclass(frozen=True)
class End:
    """How a launch ended: exit code, seconds, lines of stdout, stderr."""

    code: int
    seconds: float
    lines: list[str]
    err: str


FAILURES = ("raise", "user", "kill", "exit", "ignore-sleep-raise")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    """Of every failure, one launch after another in one process, which loads torch once."""
    _, lines, err = Run(tmp_path_factory.mktemp("failures"), ",".join(FAILURES), 3).end(80)
    found = {}
    for how in FAILURES:
        out = lines[: (place := next(i for i, line in enumerate(lines) if line.startswith(f"== {how} ")))]
        _, _, code, seconds = lines[place].split()
        said, _, err = err.partition(f"{lines[place]}\n")
        lines = lines[place + 1 :]
        found[how] = End(int(code), float(seconds), out, said)
    return found


@pytest.mark.case("LIFE-01")
def test_the_traceback_of_the_failed_rank_is_the_first_and_last_thing_shown(ends: dict[str, End]) -> None:
    end = ends["raise"]
    assert end.seconds < 15 and end.code == 1
    shown = end.err.splitlines()
    assert shown[0] == "rank 1 of 3 failed: RuntimeError: loader broke"
    assert shown[1] == "Traceback (most recent call last):"
    assert "in work" in shown[2]
    assert shown[-1] == "RuntimeError: loader broke"
    error = json.loads(end.lines[-1])["error"]
    assert (error["rank"], error["world"], error["message"]) == (1, 3, "RuntimeError: loader broke")


def test_a_user_error_is_shown_once_without_a_traceback(ends: dict[str, End]) -> None:
    assert (ends["user"].code, ends["user"].err) == (2, "bad options\n  - this\n  - that\n")


@pytest.mark.case("LIFE-02")
@pytest.mark.parametrize(("how", "end"), [("kill", "killed by SIGKILL"), ("exit", "exit code 7")])
def test_a_worker_that_dies_is_named(how: str, end: str, ends: dict[str, End]) -> None:
    assert (ends[how].code, ends[how].err) == (1, f"rank 1 of 3 failed: the process died ({end})\n")


@pytest.mark.case("LIFE-01")
def test_workers_that_ignore_sigterm_do_not_outlive_a_failure(ends: dict[str, End]) -> None:
    end = ends["ignore-sleep-raise"]
    assert end.seconds < 20 and end.code == 1
    assert end.err.startswith("rank 1 of 3 failed: RuntimeError: loader broke\n")
    workers = [int(line.split()[1]) for line in end.lines]
    assert len(workers) == 3 and not any(map(alive, workers))


# torch 2.11 gives workers that ignore SIGTERM 30 s of its own.
_GRACE_CAN_BE_SET = any(f.name == "shutdown_timeout" for f in dataclasses.fields(LaunchConfig))


@pytest.mark.case("LIFE-02")
@pytest.mark.parametrize(
    ("how", "number", "code", "limit"),
    [
        ("sleep", signal.SIGTERM, 143, 5),
        ("sleep", signal.SIGINT, 130, 5),
        ("ignore-sleep", signal.SIGTERM, 143, 15 if _GRACE_CAN_BE_SET else 45),
        ("one-ignores-sleep", signal.SIGKILL, -9, 5),
    ],
)
def test_no_worker_and_no_port_is_left_after_the_launcher(
    how: str, number: signal.Signals, code: int, limit: float, tmp_path: Path
) -> None:
    run = Run(tmp_path, how, 3).wait_for_workers(3)
    assert listens(run.port)
    began = time.monotonic()
    run.launcher.send_signal(number)
    assert run.launcher.wait(limit) == code
    assert run.left_after(limit) == []
    assert time.monotonic() - began < limit
    assert not listens(run.port)
    _, err = run.launcher.communicate(timeout=10)
    assert "Traceback" not in err


@pytest.mark.case("LIFE-02")
def test_ctrl_c_of_a_terminal_reaches_everyone_and_ends_quietly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    launcher = subprocess.Popen(
        [sys.executable, str(script), "sleep", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    workers = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
    os.killpg(launcher.pid, signal.SIGINT)
    _, err = launcher.communicate(timeout=15)
    assert (launcher.returncode, err) == (130, "")
    assert not any(map(alive, workers))


# Under a launcher, and alone


def give(argument: Mapping[str, int]) -> int:
    return argument["code"]


@pytest.mark.quick
def test_one_process_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert launch(give, {"code": 4}, 1) == 4
    assert launch(print, "", 1) == 0


@pytest.mark.case("UX-02")
@pytest.mark.quick
def test_another_number_of_processes_than_the_mesh_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launch(give, {"code": 4}, 4) == 4
    with pytest.raises(ConfigError) as caught:
        launch(give, {"code": 4}, 6, mesh_text="fsdp=3,tp=2")
    assert str(caught.value) == (
        "the processes do not fit the mesh\n"
        "  - the mesh fsdp=3,tp=2 needs 6 processes, the launcher started 4 (WORLD_SIZE): start 6 "
        "(torchrun --nproc-per-node=6) or give a mesh whose sizes multiply to 4"
    )
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match="RANK and WORLD_SIZE are set, MASTER_PORT not: start with torchrun"):
        launch(give, {"code": 4}, 4)
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match="WORLD_SIZE='four': expected a number"):
        launch(give, {"code": 4}, 4)


@pytest.mark.quick
def test_slurm_gives_rank_and_rendezvous() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
    slurm["SLURM_JOB_NODELIST"] = "gpu[007-010],login"
    assert launcher_environment(slurm) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "13456",
    }
    assert launcher_environment({**slurm, "SLURM_NTASKS": "1"}) is None
    assert launcher_environment({**slurm, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert launcher_environment({}) is None
    assert launcher_environment({"RANK": "0"}) is None


@pytest.mark.quick
@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("", ""),
        ("one", "one"),
        ("one,two", "one"),
        ("node[001-004,7]", "node001"),
        ("node[7,001-004]", "node7"),
        ("rack[2-3]node[01,05],other", "rack2node01"),
        ("node[003-005,9]-ib.cluster,login", "node003-ib.cluster"),
    ],
)
def test_the_first_host_of_slurms_short_form(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.quick
def test_values_the_user_set_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    for name in ("MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with monkeypatch.context():
        prepare_environment(2)
        assert os.environ["OMP_NUM_THREADS"] == "7"
        assert os.environ["MKL_NUM_THREADS"] == str(max(1, cores // 2))
        assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
        assert os.environ["GOMP_SPINCOUNT"] == os.environ["KMP_BLOCKTIME"] == "0"
    for name in ("MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        os.environ.pop(name, None)
