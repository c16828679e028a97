"""Rollouts beside training, with vLLM's asynchronous engine in Ray."""

from __future__ import annotations

import re

from grpo_replay import read_rollouts

AHEAD = (
    "policy.generation.vllm_cfg.async_engine=true",
    "loss_fn.use_importance_sampling_correction=true",
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.order=finished",
    "grpo.async_grpo.in_flight_weight_updates=true",
)
STEPS = 6


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


def test_a_run_whose_responses_stop_while_it_trains_ends_by_itself_and_has_trained_on_all_of_its_data(
    run_grpo, model_folder, joined, read_metrics, names_in_trace, tmp_path
):
    done = run_grpo(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={tmp_path / 'run'}",
        "logger.profile_steps=[1]",
        *AHEAD,
        f"grpo.max_num_steps={STEPS}",
        "grpo.val_at_start=false",
        "grpo.val_at_end=true",
        "grpo.log_rollouts=true",
        env=joined(),
    )
    assert done.status == 0, done.stderr
    metrics = read_metrics(tmp_path / "run")
    assert metrics[STEPS]["train/buffer_size"] == 0
    rollouts = read_rollouts(tmp_path / "run")
    assert [len(rollouts[step]) for step in range(1, STEPS + 1)] == [4 * 8] * STEPS
    for step in range(1, STEPS + 1):
        assert 0 <= metrics[step]["train/avg_trajectory_age"] <= 1
        assert metrics[step]["train/token_mult_prob_error"] < (1.001 if step == 1 else 1.5)
        assert metrics[step]["timing/collector/generation_s"] > 0
        for rollout in rollouts[step]:
            versions, counts = zip(*rollout["weight_versions"], strict=True)
            assert sum(counts) == len(rollout["token_ids"])
            assert step - 2 <= versions[0] and versions[-1] <= step - 1 and list(versions) == sorted(set(versions))
    assert "validation/accuracy" in metrics[STEPS]
    assert "died" not in done.stderr
    # The engine's worker is in a process of vLLM's.
    assert "aten::mm" in names_in_trace(tmp_path / "run" / "traces" / "step_1_engine_0_0.json.gz")
