"""However a run ends, it ends soon, says why in its last line, and leaves no process behind."""

from __future__ import annotations

import os
import signal

import pytest

TIMEOUT_S = 60


@pytest.mark.parametrize(("name", "variable"), [("vllm", "VLLM_CPU_OMP_THREADS_BIND"), ("policy", "OMP_WAIT_POLICY")])
def test_a_killed_worker_ends_the_run_with_its_name_and_the_cause(running_grpo, name, variable):
    worker = running_grpo.worker(variable)
    worker.send_signal(signal.SIGKILL)
    status, last_line, alive = running_grpo.wait(TIMEOUT_S)
    assert status == 2
    assert last_line.startswith(f"error: {name} worker 0 died during ")
    assert f"process {worker.pid}" in last_line
    assert not alive


def test_ctrl_c_ends_the_run_as_interrupted(running_grpo):
    # A terminal sends the signal to the whole process group.
    os.killpg(running_grpo.process.pid, signal.SIGINT)
    assert running_grpo.wait(TIMEOUT_S) == (130, "interrupted", [])


def test_sigterm_to_every_process_of_the_run_at_once_ends_it_without_waiting_for_rays_daemons(running_grpo):
    os.killpg(running_grpo.process.pid, signal.SIGTERM)
    status, _, alive = running_grpo.wait(20)
    assert status != 0
    assert not alive
