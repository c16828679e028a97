"""However a run ends, it ends soon, says why in its last line, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal

import pytest

TIMEOUT_S = 60
OWN_DEVICES = (
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.colocated.resources.num_nodes=1",
)


def assert_ends_with_the_cause(run, name, worker):
    status, last_line, alive = run.wait(TIMEOUT_S)
    assert status == 2
    assert last_line.startswith(f"error: {name} worker 0 died during ")
    assert f"process {worker.pid}" in last_line
    assert not alive


def test_a_killed_policy_worker_ends_the_run_with_its_name_and_the_cause(running_grpo):
    worker = running_grpo.policy()
    worker.kill()
    assert_ends_with_the_cause(running_grpo, "policy", worker)


@pytest.mark.parametrize("running_grpo", [OWN_DEVICES], indirect=True, ids=["engine on its own device"])
def test_a_killed_engine_is_started_again_while_restarts_are_left_and_then_ends_the_run(running_grpo):
    first = running_grpo.engine()
    first.kill()
    running_grpo.wait_for_step(20)
    (warning,) = [
        line for line in running_grpo.script.stderr.read_text().splitlines() if "starting the engine again" in line
    ]
    assert re.search(rf"vllm worker 0 died during \w+: process {first.pid}: .*, restarts left: 0$", warning)
    second = running_grpo.engine()
    second.kill()
    assert_ends_with_the_cause(running_grpo, "vllm", second)


def test_a_model_that_vllm_builds_in_another_way_ends_the_run_with_the_weights_that_it_has_not(
    run_in_one_process, biased_model_folder, tmp_path
):
    done = run_in_one_process(f"policy.model_name={biased_model_folder}", f"logger.log_dir={tmp_path / 'run'}")
    assert done.status == 2
    last_line = done.stderr.splitlines()[-1]
    assert last_line.startswith("error: The engine used nothing, or only a part, of model.layers.0.self_attn.o_proj.")
    assert last_line.endswith("builds this model in another way than the policy; choose one that both build alike.")
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_the_run_as_interrupted(running_grpo):
    # A terminal sends the signal to the whole process group.
    os.killpg(running_grpo.script.pid, signal.SIGINT)
    assert running_grpo.wait(TIMEOUT_S) == (130, "interrupted", [])


def test_sigterm_to_every_process_of_the_run_at_once_ends_it_without_waiting_for_rays_daemons(running_grpo):
    os.killpg(running_grpo.script.pid, signal.SIGTERM)
    status, _, alive = running_grpo.wait(20)
    assert status != 0
    assert not alive
