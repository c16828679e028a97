"""Runs that go wrong on a GPU: the cause is told, no process still holds the GPU, what was saved is whole."""

from __future__ import annotations

import re
import time

import pytest
import torch

TIMEOUT_S = 120
GOES_ON = (
    "grpo.max_num_steps=100000",
    "grpo.max_num_epochs=100000",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
)
# Long enough to be killed in.
MANY_PROMPTS = ("grpo.num_prompts_per_step=16", "policy.train_global_batch_size=128")
LONG_RESPONSES = (*MANY_PROMPTS, "policy.max_total_sequence_length=64", "policy.generation.max_new_tokens=48")
# Many passes of one sample; logprobs take one pass.
SLOW_TRAINING = (
    "grpo.num_prompts_per_step=32",
    "policy.train_global_batch_size=256",
    "policy.train_micro_batch_size=1",
    "policy.logprob_batch_size=256",
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(400),
]


def test_a_killed_engine_is_started_again_once_and_then_ends_the_run(start_grpo, on_gpu, tmp_path):
    one_restart = "policy.generation.vllm_cfg.max_restarts=1"
    run = start_grpo(f"logger.log_dir={tmp_path / 'run'}", *on_gpu, *GOES_ON, *LONG_RESPONSES, one_restart)
    run.wait_for_step(2)
    first = run.kill_engine_in_generation()
    run.wait_for_step(5)
    died = r"vllm worker 0 died during \w+: process {}"
    assert re.search(died.format(first.pid), run.script.stderr.read_text())
    second = run.kill_engine_in_generation()
    status, last_line, alive = run.wait(TIMEOUT_S)
    assert status == 2
    assert re.match(f"error: {died.format(second.pid)}", last_line)
    assert not alive


def test_a_policy_worker_killed_in_training_ends_the_run_which_goes_on_from_its_checkpoint(
    start_grpo, run_grpo, on_gpu, model_folder, tmp_path
):
    saved = (
        *on_gpu,
        *SLOW_TRAINING,
        f"logger.log_dir={tmp_path / 'run'}",
        f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}",
        "checkpointing.enabled=true",
        "checkpointing.save_period=2",
    )
    run = start_grpo(*saved, *GOES_ON)
    run.wait_for_step(3)
    worker = run.kill_in_call(run.policy(), 1.0)
    status, last_line, alive = run.wait(TIMEOUT_S)
    assert status == 2
    assert last_line.startswith(f"error: policy worker 0 died during train: process {worker.pid}")
    assert not alive
    done = run_grpo(f"policy.model_name={model_folder}", *saved, "grpo.max_num_steps=3")
    assert done.status == 0, done.stderr
    assert re.findall(r"^step (\d+)/", done.stdout, re.MULTILINE) == ["3"]


def test_an_engine_that_finds_no_room_to_wake_ends_the_run_with_who_holds_the_gpu(start_grpo, on_gpu, tmp_path):
    run = start_grpo(f"logger.log_dir={tmp_path / 'run'}", *on_gpu, *GOES_ON, *SLOW_TRAINING)
    run.wait_for_step(1)
    taken = []
    while run.script.is_running():  # whatever the engine leaves; the policy needs little
        free_bytes, _ = torch.cuda.mem_get_info()
        if free_bytes > 5 << 30:
            taken.append(torch.empty(free_bytes - (4 << 30), dtype=torch.uint8, device="cuda"))
        time.sleep(0.002)
    held_gib = sum(part.numel() for part in taken) / 2**30
    status, last_line, alive = run.wait(TIMEOUT_S)
    assert status == 2
    assert not alive
    found = re.search(r"The engine's [a-z_ ]+ need ([\d.]+) GiB to wake, but ([\d.]+) of [\d.]+ GiB", last_line)
    assert found is not None, last_line
    needed_gib, free_gib = map(float, found.groups())
    assert free_gib < needed_gib < held_gib
    assert "gpu_memory_utilization" in last_line


def test_a_refit_that_the_engine_cannot_use_ends_the_run_with_the_names_and_frees_the_gpu(
    run_grpo, on_gpu, biased_model_folder, tmp_path
):
    free_before, _ = torch.cuda.mem_get_info()
    overrides = f"policy.model_name={biased_model_folder}", f"logger.log_dir={tmp_path / 'run'}", *on_gpu
    done = run_grpo(*overrides, script="tests/support/unruled_grpo.py")
    assert done.status == 2
    cause = "error: The engine used nothing, or only a part, of model.layers.0.self_attn.o_proj.bias"
    assert f"\n{cause}" in f"\n{done.stderr}"
    free_bytes, _ = torch.cuda.mem_get_info()
    assert free_before - free_bytes < 64 << 20
