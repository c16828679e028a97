import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from nemo_offload_rl.environments.grading_pool import Failed, GradingPool, TimedOut
from nemo_offload_rl.errors import WorkerDiedError


@pytest.fixture(scope="module")
def sleepers():
    pool = GradingPool(time.sleep, num_workers=2, timeout_s=5.0)
    yield pool
    pool.close()


def test_a_stuck_job_is_killed_and_all_others_still_get_their_outcome(sleepers):
    assert sleepers.map([(600,), (0,), (0.01,), (0,)]) == [TimedOut(), None, None, None]
    assert sleepers.map([(0,), (0,), (0,)]) == [None, None, None]


def test_a_job_that_raises_is_an_outcome_with_its_reason(sleepers):
    (failed,) = sleepers.map([(-1,)])
    assert isinstance(failed, Failed)
    assert "ValueError" in failed.reason


def test_a_long_job_of_one_thread_does_not_hold_up_another_and_ends_with_the_pool():
    pool = GradingPool(time.sleep, num_workers=2, timeout_s=86400.0)
    threads = ThreadPoolExecutor()
    long = threads.submit(pool.map, [(86400,)])
    others = [threads.submit(pool.map, [(0,)] * 5) for _ in range(3)]
    assert [other.result() for other in others] == [[None] * 5] * 3
    assert not long.done()
    pool.close()
    with pytest.raises(RuntimeError, match="the grading processes were ended"):  # not a failure of the job
        long.result()
    threads.shutdown()


def test_no_jobs_give_no_outcomes(sleepers):
    assert sleepers.map([]) == []


def test_outcomes_keep_the_order_of_jobs():
    pool = GradingPool(operator.mul, num_workers=2, timeout_s=300.0)
    try:
        assert pool.map([(i, 10) for i in range(20)]) == [10 * i for i in range(20)]
    finally:
        pool.close()


def test_a_worker_that_dies_is_replaced_and_closing_leaves_no_process():
    others = set(multiprocessing.active_children())
    pool = GradingPool(os._exit, num_workers=1, timeout_s=300.0)
    outcomes = pool.map([(3,), (4,)])
    assert [outcome.reason for outcome in outcomes] == [
        "the grading process ended with exit code 3",
        "the grading process ended with exit code 4",
    ]
    pool.close()
    pool.close()
    assert set(multiprocessing.active_children()) == others


def test_a_worker_that_ended_while_it_was_idle_is_replaced_and_loses_no_job():
    pool = GradingPool(eval, num_workers=1, timeout_s=300.0)
    try:
        for _ in range(3):
            (pid,) = pool.map([("__import__('os').getpid()",)])
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda gone=Path(f"/proc/{pid}"): not gone.exists())  # its keeper may be there still
            assert pool.map([("1 + 1",)]) == [2]
    finally:
        pool.close()


def test_a_worker_that_cannot_start_is_an_error_and_not_an_endless_restart():
    pool = GradingPool(os._exit, num_workers=1, timeout_s=300.0, warm_up=(7,))
    with pytest.raises(WorkerDiedError, match="exit code 7"):
        pool.map([(0,)])
    pool.close()


# Children, one in a session of its own, and one whose parents have ended.
LEAVES = "sleep {0} & setsid sleep {0} & (setsid sh -c 'setsid sleep {0} &' &) ; "


@pytest.fixture
def duration():
    """Seconds that tell the processes of one test from all others."""
    return f"{86400 + os.getpid()}.{time.monotonic_ns()}"


def running(duration: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(b"sleep\0" + duration.encode()):
                found.append(path.parent.name)
    return found


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_processes_that_a_job_starts_end_with_its_timeout(duration):
    pool = GradingPool(os.system, num_workers=1, timeout_s=3.0, warm_up=("true",))
    try:
        assert pool.map([(LEAVES.format(duration) + "sleep 600",)]) == [TimedOut()]
        assert not running(duration)
    finally:
        pool.close()


def test_processes_that_a_job_starts_stay_for_the_next_and_end_with_the_pool(duration):
    pool = GradingPool(os.system, num_workers=1, timeout_s=300.0)
    try:
        assert pool.map([(LEAVES.format(duration),)]) == [0]
        wait_for(lambda: len(running(duration)) == 3)
        assert pool.map([("true",)]) == [0]
        assert len(running(duration)) == 3
    finally:
        pool.close()
    assert not running(duration)


def test_processes_of_what_was_awaited_too_long_end_before_the_next_job(duration):
    """Of many responses that are awaited together one is given up, and its worker lives."""
    pool = GradingPool(eval, num_workers=1, timeout_s=300.0, warm_up=("0",))
    outcome = "[__import__('nemo_offload_rl.environments.grading_pool', fromlist=['TimedOut']).TimedOut()]"
    try:
        (first,) = pool.map([("__import__('os').getpid()",)])
        assert pool.map([(outcome,)]) == [[TimedOut()]]
        assert pool.map([("__import__('os').getpid()",)]) == [first]
        job = f"__import__('os').system({LEAVES.format(duration)!r}) or {outcome}"
        assert pool.map([(job,)]) == [[TimedOut()]]
        assert not running(duration)
        assert pool.map([("__import__('os').getpid()",)]) != [first]
    finally:
        pool.close()


def test_processes_that_a_job_starts_end_with_the_run_even_where_that_is_killed(duration):
    script = (
        "import os\n"
        "from nemo_offload_rl.environments.grading_pool import GradingPool\n"
        "pool = GradingPool(os.system, num_workers=2, timeout_s=600.0)\n"
        f"pool.map([({LEAVES.format(duration)!r} + 'sleep 600',)] * 2)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        wait_for(lambda: len(running(duration)) == 6)
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not running(duration))


def test_a_worker_that_is_ended_by_a_signal_says_which():
    pool = GradingPool(eval, num_workers=1, timeout_s=300.0)
    try:
        (failed,) = pool.map([("__import__('os').kill(__import__('os').getpid(), 9)",)])
        assert failed.reason == "the grading process ended with exit code 137"
    finally:
        pool.close()
