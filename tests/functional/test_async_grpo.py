"""Rollouts beside training, with vLLM's asynchronous engine in Ray."""

from __future__ import annotations

import re
import signal
from collections import Counter

import psutil
from grpo_replay import read_rollouts

AHEAD = (
    "policy.generation.vllm_cfg.async_engine=true",
    "loss_fn.use_importance_sampling_correction=true",
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.order=finished",
    "grpo.async_grpo.in_flight_weight_updates=true",
)
STEPS = 6
EPOCH = 8  # steps; 4 prompts each, of 32


def test_a_run_that_takes_groups_as_they_finish_outlives_an_engine_and_leaves_nothing_when_a_policy_worker_dies(
    start_endless_grpo, joined, read_metrics, tmp_path
):
    run = start_endless_grpo(
        *AHEAD,
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=2",
        "policy.generation.colocated.resources.num_nodes=1",
        "grpo.async_grpo.max_trajectory_age_steps=2",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
        "grpo.val_period=2",
        "grpo.log_rollouts=true",
        env=joined(),
    )
    run.wait_for_step(4)
    engine = run.engine(of=2)
    engine.kill()
    run.wait_for_step(STEPS)
    worker = run.policy()
    worker.kill()
    status, last_line, alive = run.wait(1500)
    assert (status, alive) == (2, [])
    assert re.match(rf"error: policy worker 0 died during \w+: process {worker.pid}", last_line)
    metrics = read_metrics(tmp_path / "run")
    ages = [metrics[step]["train/avg_trajectory_age"] for step in range(1, STEPS + 1)]
    # What the engine lost is begun again with the weights of that time.
    assert ages[0] == 0 and all(0 <= age <= 2 for age in ages)
    steps = read_rollouts(tmp_path / "run").values()
    prompts = [[rollout["prompt"] for rollout in rollouts[::8]] for rollouts in steps]  # groups of 8
    assert [len(step) for step in prompts[:STEPS]] == [4] * STEPS
    (warning,) = [line for line in run.script.stderr.read_text().splitlines() if "starting the engine again" in line]
    assert re.search(rf"process {engine.pid}: .*, restarts left: 1$", warning)
    for step in range(1, STEPS + 1):
        assert metrics[step]["train/token_mult_prob_error"] < (1.001 if step == 1 else 1.5)
        assert metrics[step]["train/trained_length_mean"] == metrics[step]["train/mean_response_tokens"]
        assert metrics[step]["residency/bytes_freed"] == 0  # the policy has its devices for itself
        assert metrics[step]["train/max_token_age"] <= 2
    assert all("validation/accuracy" in metrics[step] for step in range(2, STEPS + 1, 2))


def test_a_run_whose_responses_stop_while_it_trains_survives_its_engine_and_ctrl_c_and_loses_no_prompt(
    start_endless_grpo, run_grpo, model_folder, joined, read_metrics, names_in_trace, tmp_path
):
    keys = (
        *AHEAD,
        f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}",
        "checkpointing.enabled=true",
        "checkpointing.save_period=100000",
        "grpo.log_rollouts=true",
        "data.train.size=32",
        "env.arithmetic.num_workers=2",
        # Wrong answers get a second turn; half of the characters end a response.
        "grpo.max_rollout_turns=2",
        "env.arithmetic.retry_message='= '",
        "policy.max_total_sequence_length=48",
        "policy.generation.stop_token_ids=[4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19]",
    )
    run = start_endless_grpo(*keys, "logger.profile_steps=[1]", env=joined())
    run.wait_for_step(2)
    run.engine().kill()
    run.wait_for_step(4)
    # A terminal sends the signal to the whole process group.
    for process in (*run.children, psutil.Process(run.script.pid)):
        if process.is_running():  # the engine was killed
            process.send_signal(signal.SIGINT)
    status, last_line, alive = run.wait(1500)
    assert (status, last_line, alive) == (130, "interrupted", [])
    errors = run.script.stderr.read_text()
    assert errors.count("starting the engine again") == errors.count("the last lines of vllm worker 0") == 1
    assert "Traceback" not in errors
    # The engine's worker is in a process of vLLM's.
    assert "aten::mm" in names_in_trace(tmp_path / "run" / "traces" / "step_1_engine_0_0.json.gz")
    (checkpoint,) = (tmp_path / "checkpoints").glob("step_*")
    saved = int(checkpoint.name.removeprefix("step_"))
    last = -(-(saved + 2) // EPOCH) * EPOCH
    done = run_grpo(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={tmp_path / 'run'}",
        *keys,
        f"grpo.max_num_steps={last}",
        f"grpo.max_num_epochs={last // EPOCH}",
        "grpo.val_at_start=false",
        "grpo.val_at_end=true",
        env=joined(),
    )
    assert done.status == 0, done.stderr
    metrics, rollouts = read_metrics(tmp_path / "run"), read_rollouts(tmp_path / "run")
    assert metrics[last]["train/buffer_size"] == 0
    assert "validation/accuracy" in metrics[last]
    assert "died" not in done.stderr
    prompts = Counter(rollout["prompt"] for step in rollouts.values() for rollout in step[::8])
    assert list(prompts.values()) == [last // EPOCH] * 4 * EPOCH
    for step in range(1, last + 1):
        assert len(rollouts[step]) == 4 * 8
        began = [step - 1 - rollout["weight_versions"][0][0] for rollout in rollouts[step]]
        assert metrics[step]["train/avg_trajectory_age"] == sum(began) / len(began) <= 1
        assert metrics[step]["train/token_mult_prob_error"] < (1.001 if step in (1, saved + 1) else 1.5)
        assert metrics[step]["timing/collector/generation_s"] > 0
        assert 1 < metrics[step]["train/mean_turns"] <= 2
        for rollout in rollouts[step]:
            versions, counts = zip(*rollout["weight_versions"], strict=True)
            assert sum(counts) == sum(rollout["token_mask"])
            assert step - 2 <= versions[0] and versions[-1] <= step - 1 and list(versions) == sorted(set(versions))
