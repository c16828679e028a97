"""Where policy and engine live: on the same devices, each on their own, one engine over several; CPU and GPU."""

from __future__ import annotations

import pytest
import torch

STEPS = 8
OWN_DEVICES = (
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.generation.colocated.resources.num_nodes=1",
)
ON_GPU = (
    "policy.precision=bfloat16",
    "policy.generation.vllm_cfg.kv_cache_memory_gib=null",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.3",
    "policy.generation.vllm_cfg.max_model_len=64",
    "policy.host_memory_budget_gib=8",
)
# Long enough to be killed in.
LONG_RESPONSES = ("policy.max_total_sequence_length=64", "policy.generation.max_new_tokens=48")
# What does not depend on the clock or on where bytes are.
SAME = ("train/loss", "train/grad_norm", "train/reward_mean", "train/kl", "train/token_mult_prob_error")


def short_run(log_dir):
    return (
        f"logger.log_dir={log_dir}",
        f"grpo.max_num_steps={STEPS}",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    )


@pytest.fixture
def metrics_of(model_folder, tmp_path, run_grpo, read_metrics):
    """Metrics of a short run with overrides, by step."""

    def run(name: str, *overrides: str) -> dict[int, dict[str, float]]:
        done = run_grpo(f"policy.model_name={model_folder}", *short_run(tmp_path / name), *overrides)
        assert done.status == 0, done.stderr
        return read_metrics(tmp_path / name)

    return run


def test_a_shared_engine_that_is_killed_and_one_on_devices_of_its_own_give_the_same_numbers(
    metrics_of, start_grpo, read_metrics, tmp_path
):
    apart = metrics_of("apart", *OWN_DEVICES, *LONG_RESPONSES)
    run = start_grpo(*short_run(tmp_path / "shared"), *LONG_RESPONSES, "policy.generation.vllm_cfg.max_restarts=1")
    run.wait_for_step(1)
    dead = run.kill_engine_in_generation()
    run.wait_for_step(STEPS - 1)
    status, _, alive = run.wait(60)
    assert (status, alive) == (0, [])
    assert f"vllm worker 0 died during generate: process {dead.pid}" in run.stderr.read_text()
    shared = read_metrics(tmp_path / "shared")
    for step in range(1, STEPS + 1):
        assert {name: shared[step][name] for name in SAME} == {name: apart[step][name] for name in SAME}
    assert sum("timing/engine_restart_s" in metrics for metrics in shared.values()) == 1
    # Nothing is offloaded where engines have devices of their own.
    assert shared[STEPS]["residency/bytes_freed"] > 0
    assert apart[STEPS]["residency/bytes_freed"] == 0


needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


@pytest.mark.gpu
@needs_gpus
@pytest.mark.timeout(400)
def test_policy_and_engine_share_a_gpu_and_each_leaves_it_to_the_other(metrics_of):
    metrics = metrics_of("gpu", "cluster.gpus_per_node=1", *ON_GPU)[STEPS]
    assert metrics["train/token_mult_prob_error"] < 1.05
    assert metrics["memory/generation_policy_gib"] < 2
    assert metrics["memory/training_engine_gib"] < 4
    assert metrics["memory/generation_engine_gib"] > 20


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.gpus_per_node=2",),
        ("cluster.gpus_per_node=2", "policy.generation.vllm_cfg.tensor_parallel_size=2"),
        ("cluster.gpus_per_node=1", *OWN_DEVICES),
    ],
    ids=["one engine each", "one engine over both", "each on its own"],
)
def test_two_gpus_in_every_arrangement_agree_on_logprobs(metrics_of, overrides):
    metrics = metrics_of("gpus", *overrides, *ON_GPU)
    assert all(metrics[step]["train/token_mult_prob_error"] < 1.05 for step in range(1, STEPS + 1))
