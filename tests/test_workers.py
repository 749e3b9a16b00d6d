"""The pool of gloo workers: results, every way a task can fail, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from dtensor_lm.errors import ConfigError, UserError
from dtensor_lm.processes import Failure, by_cause, exit_text
from dtensor_lm.testing.workers import WorkerError, WorkerPool, pool

pytestmark = pytest.mark.timeout(60)


def total(start: float, factor: float = 1.0) -> float:
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return value.item() * factor


def rank_and_threads() -> tuple[int, int, str]:
    return dist.get_rank(), torch.get_num_threads(), os.environ["OMP_WAIT_POLICY"]


def one_raises(error: BaseException) -> float:
    if dist.get_rank() == 2:
        raise error
    return total(0.0)


def one_ends(how: str) -> float:
    if dist.get_rank() == 1:
        if how == "sys.exit":
            sys.exit(3)
        if how == "os._exit":
            os._exit(3)
        os.kill(os.getpid(), signal.Signals[how])
    return total(0.0)


def one_sleeps() -> float:
    if dist.get_rank() == 1:
        time.sleep(60)
    return total(0.0)


def leaves_the_group() -> bool:
    dist.destroy_process_group()
    return True


def many_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group([0, 1])
    return os.getpid()


def where() -> str:
    return os.getcwd()


def test_results_come_by_rank_and_the_workers_are_kept() -> None:
    assert pool(4) is pool(4)
    assert pool(4).run(total, 1.0, factor=2.0) == [20.0] * 4
    first = pool(4).run(os.getpid)
    assert pool(4).run(os.getpid) == first and len(set(first)) == 4


def test_each_worker_has_its_share_of_the_cores_and_does_not_spin() -> None:
    for rank, (own, threads, policy) in enumerate(pool(4).run(rank_and_threads)):
        assert (own, policy.upper()) == (rank, "PASSIVE")
        assert threads == max(1, len(os.sched_getaffinity(0)) // 4)


def test_tasks_run_where_the_caller_is(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert pool(2).run(where) == [str(tmp_path)] * 2


def test_an_exception_is_shown_with_its_rank_and_traceback_and_the_pool_recovers() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool(4).run(one_raises, RuntimeError("loader broke"))
    assert time.monotonic() - began < 5
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 2 of 4 failed: RuntimeError: loader broke"
    assert lines[1] == "Traceback (most recent call last):"
    assert "in one_raises" in str(caught.value)
    assert lines[-1] == "RuntimeError: loader broke"
    assert pool(4).run(total, 0.0) == [6.0] * 4


def test_a_user_error_arrives_as_it_was_raised() -> None:
    with pytest.raises(ConfigError) as caught:
        pool(4).run(one_raises, ConfigError("bad", ["this", "that"]))
    assert str(caught.value) == "bad\n  - this\n  - that"
    assert pool(4).run(total, 0.0) == [6.0] * 4


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sys.exit", "rank 1 of 3 failed: SystemExit: 3"),
        ("os._exit", "rank 1 of 3 failed: the process died (exit code 3)"),
        ("SIGKILL", "rank 1 of 3 failed: the process died (killed by SIGKILL)"),
        ("SIGSEGV", "rank 1 of 3 failed: the process died (killed by SIGSEGV)"),
    ],
)
def test_the_end_of_one_worker_names_it(how: str, expected: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool(3).run(one_ends, how, timeout=20)
    assert str(caught.value).splitlines()[0] == expected
    assert pool(3).run(total, 0.0) == [3.0] * 3


def test_a_hang_shows_where_each_unfinished_rank_is() -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool(3).run(one_sleeps, timeout=2)
    assert time.monotonic() - began < 6
    text = str(caught.value)
    assert text.splitlines()[0] == "timed out after 2 s; unfinished: rank 0, rank 1, rank 2"
    sleeper = text.partition("rank 1 of 3 is at:")[2].partition("rank 2 of 3 is at:")[0]
    assert "in one_sleeps" in sleeper and "all_reduce" not in sleeper
    assert "in all_reduce" in text.partition("rank 2 of 3 is at:")[2]
    assert pool(3).run(total, 0.0) == [3.0] * 3


def test_a_task_may_leave_the_group_or_make_many() -> None:
    assert pool(2).run(leaves_the_group) == [True, True]
    assert pool(2).run(total, 0.0) == [1.0, 1.0]
    used = pool(2).run(many_groups, 101)
    assert pool(2).run(total, 0.0) == [1.0, 1.0]
    assert not set(used) & set(pool(2).run(os.getpid))


def test_what_cannot_be_sent_is_refused_in_the_caller() -> None:
    with pytest.raises(Exception, match="pickle"):
        pool(2).run(lambda: None)
    with pytest.raises(ValueError, match="at least one worker, got world=0"):
        WorkerPool(0)


_SCRIPT = """
import os, sys, time
import torch.distributed as dist
from dtensor_lm.testing.workers import pool

def process() -> int:
    return os.getpid()

def sleep() -> None:
    time.sleep(600)

if __name__ == "__main__":
    print(*pool(3).run(process), flush=True)
    if sys.argv[1] == "sleep":
        pool(3).run(sleep, timeout=600)
"""


def alive(process: int) -> bool:
    """Whether the process runs; one that ended and was not reaped yet (state Z) does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ending", ["end", "sleep"])
def test_no_worker_outlives_its_parent(ending: str, tmp_path: os.PathLike[str]) -> None:
    script = os.path.join(tmp_path, "script.py")
    with open(script, "w") as file:
        file.write(_SCRIPT)
    parent = subprocess.Popen([sys.executable, script, ending], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 3
    if ending == "sleep":
        assert all(map(alive, workers))
        parent.kill()
    parent.wait(10)
    end = time.monotonic() + 5
    while any(map(alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, workers))
    parent.stdout.close()


def test_a_program_without_a_file_can_use_the_pool_but_not_its_own_functions() -> None:
    program = (
        "import os\nfrom dtensor_lm.testing.workers import pool\nprint(len(pool(2).run(os.getpid)))\n"
        "def mine(): pass\npool(2).run(mine)\n"
    )
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2\n"
    assert done.stderr.splitlines()[-1] == (
        "ValueError: mine is defined in a program without a file (stdin, -c or a notebook), "
        "which workers cannot import; put it into a module"
    )


def test_a_lost_connection_never_hides_the_cause() -> None:
    lost = Failure(0, 1.0, "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    cause = Failure(3, 2.0, "the process died (killed by SIGKILL)")
    later = Failure(2, 3.0, "KeyError: 'x'")
    assert by_cause([later, lost, cause]) == [cause, later, lost]
    assert exit_text(-9) == "killed by SIGKILL" and exit_text(4) == "exit code 4"
    assert Failure.of(0, UserError("Connection closed")).lost_connection is False
