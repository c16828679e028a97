"""However a run ends, it ends soon, says why in its last line, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil

from nemo_offload_rl.memory.limits import THRESHOLD, as_started_here
from nemo_offload_rl.utils.progress import shown_python

TIMEOUT_S = 1500


def test_a_model_that_vllm_builds_in_another_way_ends_the_run_with_the_weights_that_it_has_not(
    run_grpo, run_in_one_process, biased_model_folder, tmp_path
):
    overrides = f"policy.model_name={biased_model_folder}", f"logger.log_dir={tmp_path / 'run'}"
    refused = run_in_one_process(*overrides)
    assert refused.status == 2
    assert "has attention_bias true, which the engine would leave out; use another model, or" in refused.stderr
    done = run_grpo(*overrides, script="tests/support/unruled_grpo.py")
    assert done.status == 2
    reason, *last_lines = done.stderr.splitlines()[-3:]
    assert reason.startswith("error: The engine used nothing, or only a part, of model.layers.0.self_attn.o_proj.")
    assert reason.endswith(
        "vLLM builds this model in another way; choose a model that vLLM and the policy build in the same way."
    )
    run_dir = tmp_path / "run"
    assert last_lines == [f"  logs    {run_dir}", f"  report  {shown_python()} -m nemo_offload_rl.report {run_dir}"]
    assert "Traceback" not in done.stderr


def saving(folder: Path) -> tuple[str, ...]:
    """Keys with which only the end of a run saves."""
    return f"checkpointing.checkpoint_dir={folder}", "checkpointing.enabled=true", "checkpointing.save_period=100000"


def test_ctrl_c_saves_and_ends_the_run_as_interrupted_and_the_process_can_run_again(
    start_endless_grpo, joined, tmp_path
):
    keys = *saving(tmp_path / "checkpoints"), "checkpointing.keep_top_k=2"
    run = start_endless_grpo(*keys, env=joined(), script="tests/support/interrupted_grpo.py")
    run.wait_for_step(2)
    # A terminal sends the signal to the whole process group.
    for process in (*run.children, psutil.Process(run.script.pid)):
        process.send_signal(signal.SIGINT)
    assert run.wait(TIMEOUT_S) == (130, "interrupted", [])
    shown = [int(step) for step in re.findall(r"^step (\d+)/", run.script.stdout.read_text(), re.M)]
    assert shown == [*range(1, len(shown) + 1)]
    checkpoint, later = (tmp_path / "checkpoints" / f"step_{step}" for step in shown[-2:])
    assert {path.name for path in (tmp_path / "checkpoints").glob("step_*")} == {checkpoint.name, later.name}
    assert run.script.stderr.read_text().endswith(
        f"  checkpoint  {checkpoint}\n"
        f"  logs        {tmp_path / 'run'}\n"
        f"  report      {shown_python()} -m nemo_offload_rl.report {tmp_path / 'run'}\n"
        "  go on       start the same command again\n"
    )


def test_a_spot_instance_whose_processes_all_get_sigterm_saves_before_it_ends(start_endless_grpo, tmp_path):
    run = start_endless_grpo(*saving(tmp_path / "checkpoints"), "checkpointing.grace_s=0")
    run.wait_for_step(2)
    (daemon,) = (child for child in run.children if child.name() == "raylet")
    assert daemon.environ()[THRESHOLD] == as_started_here()[THRESHOLD]
    assert os.getpgid(daemon.pid) == run.script.pid
    os.killpg(run.script.pid, signal.SIGTERM)
    assert run.wait(TIMEOUT_S) == (143, "ended by SIGTERM", [])
    (checkpoint,) = (tmp_path / "checkpoints").glob("step_*")
    (last_shown,) = re.findall(r"^step (\d+)/", run.script.stdout.read_text(), re.M)[-1:]
    assert checkpoint.name == f"step_{last_shown}"
    assert f"\n  checkpoint  {checkpoint}\n" in run.script.stderr.read_text()
