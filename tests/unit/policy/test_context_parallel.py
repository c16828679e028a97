"""Ranks that share each row compute what one computes: losses of GRPO, which are of whole rows, and training steps."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import assert_close
from pg_cases import PLAIN
from policy_cases import (
    NLL,
    NO_LORA,
    full_grads,
    full_params,
    hf_logprobs,
    make_batch,
    make_settings,
    run_ranks,
    save_family,
    shard,
    worker_of,
)
from transformers import AutoModelForCausalLM

from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch
from nemo_offload_rl.protocols.backend import ProcessInfo

SHARED: dict[str, Any] = {"context_parallel_size": 2, "train_micro_batch_size": 4}
LOSSES = (
    ClippedPGLoss(replace(PLAIN, reference_policy_kl_penalty=0.5, use_importance_sampling_correction=True)),
    # A ratio for each response, whose tokens are on both ranks.
    ClippedPGLoss(replace(PLAIN, sequence_level_importance_ratios=True, token_level_loss=False)),
)


def policy_gradient_batch(now_BS: torch.Tensor) -> PolicyGradientBatch:
    """Beside logprobs of the policy: others near them, and advantages."""
    generator = torch.Generator().manual_seed(1)

    def near(scale: float) -> torch.Tensor:
        return now_BS + scale * torch.randn(now_BS.shape, generator=generator)

    plain = make_batch()
    return PolicyGradientBatch(
        **{field.name: getattr(plain, field.name) for field in fields(plain)},
        rewards=torch.arange(len(plain)) % 2.0,
        advantages=torch.randn(len(plain), 1, generator=generator).expand_as(now_BS).contiguous(),
        prev_logprobs=near(0.2),
        generation_logprobs=near(0.3),
        reference_logprobs=near(1.0),
    )


def losses_of_grpo_are_of_whole_rows(process: ProcessInfo, folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = policy_gradient_batch(hf_logprobs(model, make_batch()).detach())
    mask = batch.loss_mask
    norm = LossNorm(float(batch.sample_mask.sum()), float(mask.sum()), batch.num_positive_tokens())
    with worker_of(make_settings(folder, **SHARED), process) as worker:
        assert len(shard(batch, worker)) == len(batch)
        worker.prepare_for_training()
        for loss_fn in LOSSES:
            model.zero_grad()
            logprobs_BS = hf_logprobs(model, batch)
            expected, expected_metrics = loss_fn(logprobs_BS, batch, norm, logprobs_BS)
            expected.backward()
            loss, metrics = worker.forward_backward(batch, loss_fn)
            assert_close(loss, float(expected))
            for name in ("actor_loss", "kl"):
                assert_close(metrics[name], float(expected_metrics[name]))
            wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            assert_close(full_grads(worker), wanted)
            worker.zero_grad()


def steps_are_those_of_data_parallel_ranks(process: ProcessInfo, folder: str, **lora: Any) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    for changes in ({}, SHARED):
        with worker_of(make_settings(folder, max_grad_norm=0.5, **lora, **changes), process) as worker:
            worker.prepare_for_training()
            results = [worker.train(shard(make_batch(seed=seed), worker), NLL()) for seed in range(3)]
            losses = torch.tensor([[*result.loss, *result.grad_norm] for result in results])
            lowest = torch.tensor([result.metrics["logprob_min"] for result in results])
            seen.append({**full_params(worker), "losses": losses, "lowest": lowest})
    assert_close(seen[1], seen[0])


def check(process: ProcessInfo, folder: str) -> None:
    losses_of_grpo_are_of_whole_rows(process, folder)
    steps_are_those_of_data_parallel_ranks(process, folder)
    steps_are_those_of_data_parallel_ranks(process, folder, lora_cfg=replace(NO_LORA, enabled=True))


@pytest.mark.processes
def test_two_ranks_that_share_rows_compute_the_losses_and_steps_of_one(tmp_path: Path) -> None:
    save_family(tmp_path / "model", "qwen3")
    run_ranks(2, tmp_path, check, str(tmp_path / "model"))
