"""Agents that talk HTTP to an engine that sleeps while the policy trains on the same GPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(400),
]


def test_agents_over_http_train_on_the_logprobs_that_were_sampled(
    model_folder, run_grpo, on_gpu, read_metrics, tmp_path
):
    done = run_grpo(
        f"policy.model_name={model_folder}",
        f"logger.log_dir={tmp_path / 'run'}",
        *on_gpu,
        "grpo.max_num_steps=3",
        "+env.sums={target: tests/support/agents_of_tests.py:TwoTurns, kwargs: {hint: '= '}, num_workers: 0, "
        "timeout_s: 60}",
        "data.default.env_name=sums",
        "grpo.reward_shaping.enabled=false",
        "policy.max_total_sequence_length=64",
        "policy.generation.vllm_cfg.async_engine=true",
        "policy.generation.vllm_cfg.expose_http_server=true",
        "policy.generation.temperature=0.8",
        # Any character of the demo's ends a response, so that an untrained model's have an end.
        f"policy.generation.stop_token_ids={list(range(4, 20))}",
    )
    assert done.status == 0, done.stderr
    metrics = read_metrics(tmp_path / "run")
    for step in (1, 2, 3):
        record = metrics[step]
        assert record["train/mean_turns"] == 2
        assert record["train/token_mult_prob_error"] < 1.02
        assert record["train/grad_norm"] > 1e-3
