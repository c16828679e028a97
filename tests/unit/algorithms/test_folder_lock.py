"""Who gets a folder of checkpoints, and who does not."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest

from nemo_offload_rl.algorithms.folder_lock import LOCK_FILE, FolderLock, Holder
from nemo_offload_rl.errors import CheckpointError

FOREVER_S = 600.0
ELSEWHERE = {"place": "another host", "host": "other"}


def leave_lock(folder, **changes):
    """The lock of a holder that never renews it."""
    lock = FolderLock(folder, replace(Holder.this_process(), **changes))
    assert lock._created(lock.path)
    return lock


def take(folder, patience_s=FOREVER_S, environ=os.environ):
    return FolderLock(folder, Holder.this_process(environ), patience_s=patience_s)


def test_a_lock_belongs_to_one_run_until_its_end_and_the_other_is_told_whose_it_is(tmp_path):
    with take(tmp_path) as first:
        text = rf"another run uses .*{tmp_path} \(process {os.getpid()} on .*, started 20.*remove {first.path}"
        with pytest.raises(CheckpointError, match=text) as caught, take(tmp_path):
            pass
        assert "\n" not in str(caught.value)
        first.check_held()
    assert not list(tmp_path.iterdir())
    with take(tmp_path):
        pass


def test_a_killed_run_leaves_a_lock_that_is_taken_over_at_once_reaped_or_not(tmp_path):
    ready, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with take(tmp_path):
                os.write(write, b"1")
                signal.pause()
        finally:
            os._exit(1)
    os.read(ready, 1)
    with pytest.raises(CheckpointError, match=f"process {pid} on"), take(tmp_path):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie
    with take(tmp_path) as lock:
        lock.check_held()
    os.waitpid(pid, 0)
    leave_lock(tmp_path, pid=pid)
    with take(tmp_path):
        pass
    leave_lock(tmp_path, process_start="1")  # a process number that was given again
    with take(tmp_path):
        pass


def test_a_holder_on_another_host_is_alive_if_it_renews_its_lock_and_gone_if_it_does_not(tmp_path):
    me = replace(Holder.this_process(), **ELSEWHERE)
    with (
        FolderLock(tmp_path, me, beat_s=0.01),
        pytest.raises(CheckpointError, match=r"process \d+ on other, started"),
        take(tmp_path),
    ):
        pass
    for broken in (False, True):
        left = leave_lock(tmp_path, **ELSEWHERE)
        if broken:
            left.path.write_text("{")
        with take(tmp_path, patience_s=0.2) as lock:
            lock.check_held()


def test_a_requeued_slurm_job_knows_that_its_earlier_start_has_ended(tmp_path):
    leave_lock(tmp_path, **ELSEWHERE, job="7", restarts=0)
    with take(tmp_path, environ={"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}):
        pass
    # Another step of the same start, and another job, may be running.
    for job, restarts in (("7", 1), ("8", 0)):
        me = replace(Holder.this_process(), **ELSEWHERE, job=job, restarts=restarts)
        environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
        with FolderLock(tmp_path, me, beat_s=0.01), pytest.raises(CheckpointError), take(tmp_path, environ=environ):
            pass


def test_of_runs_that_take_over_at_once_one_gets_the_lock(tmp_path):
    for _ in range(20):
        leave_lock(tmp_path, process_start="1")
        start, end = threading.Barrier(3), threading.Barrier(3)
        outcomes = []

        def run(start=start, end=end, outcomes=outcomes):
            start.wait()
            try:
                with take(tmp_path) as lock:
                    lock.check_held()
                    outcomes.append("held")
                    end.wait()
            except CheckpointError:
                outcomes.append("refused")
                end.wait()

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        start.wait()
        end.wait()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["held", "refused"]
        assert not list(tmp_path.iterdir())


def test_a_run_that_was_killed_as_it_took_over_keeps_nobody_out(tmp_path):
    leave_lock(tmp_path, process_start="1")
    claim = tmp_path / f"{LOCK_FILE}.claim"
    claim.write_text("")
    os.utime(claim, (1, 1))
    with take(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_run_whose_lock_was_taken_meanwhile_is_told_and_leaves_it_alone(tmp_path):
    with take(tmp_path) as lock:
        lock.path.unlink()  # by hand
        lock.check_held()
        assert lock.path.is_file()
        lock.path.unlink()
        leave_lock(tmp_path, **ELSEWHERE)
        with pytest.raises(CheckpointError, match=r"was taken over by another run, process \d+ on other"):
            lock.check_held()
    assert (tmp_path / LOCK_FILE).is_file()
