"""A whole run that is killed with all its processes goes on from its last complete checkpoint."""

from __future__ import annotations

import re
from contextlib import suppress

import psutil

from nemo_offload_rl.report import read_metrics

EXTRA_STEPS = 2


def test_a_run_killed_while_it_saves_in_the_background_goes_on_when_it_is_started_again(
    start_grpo, joined, run_in_one_process, model_folder, tmp_path
):
    overrides = [
        f"policy.model_name={model_folder}",
        f"logger.log_dir={tmp_path / 'run'}",
        f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}",
        "checkpointing.enabled=true",
        "checkpointing.async_save=true",
        "checkpointing.save_consolidated=true",
        "checkpointing.save_period=1",
        "checkpointing.keep_top_k=2",
        "grpo.max_num_epochs=1000",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    ]
    run = start_grpo(*overrides, "grpo.max_num_steps=1000", env=joined())
    run.wait_for_step(3)
    run.script.kill()
    for child in run.children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(run.children, timeout=1500)

    complete = [int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir() if path.name[5:].isdigit()]
    # The save after step 2 was finished by the one after step 3 at the latest; more may have come before the kill.
    assert complete and max(complete) >= 2
    last_step = max(complete) + EXTRA_STEPS
    done = run_in_one_process(*overrides, f"grpo.max_num_steps={last_step}")
    assert done.status == 0, done.stderr
    first = re.search(r"^step (\d+)/", done.stdout, re.MULTILINE)
    assert first is not None and int(first.group(1)) == max(complete) + 1
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {f"step_{last_step - 1}", f"step_{last_step}"}
    assert (tmp_path / "checkpoints" / f"step_{last_step}" / "hf" / "model.safetensors").is_file()
    # A step that was done before the kill and not saved is done again; its later values count.
    assert list(read_metrics(tmp_path / "run").by_step) == list(range(1, last_step + 1))
