"""Each algorithm, set up by its keys, against the formula of a paper or a peer: value and gradient, in plain torch.

The formulas are those of NeMo-RL (commit 7ea279abf), TRL's GRPOTrainer and verl's core_algos, written down here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pg_cases import random_batch
from torch import Tensor

from nemo_offload_rl.algorithms.advantages import token_advantages
from nemo_offload_rl.algorithms.agreement import disagreement, without_disagreement
from nemo_offload_rl.algorithms.distillation import DistillationLoss
from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.data.batch import SampledBatch, TopKBatch
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.grpo import DistillationLossConfig
from nemo_offload_rl.protocols.loss import DivergenceScores
from nemo_offload_rl.runs.loading import load_grpo_config

EXEMPLAR = "examples/configs/grpo_math_1B.yaml"
NO_KL = "loss_fn.reference_policy_kl_penalty=0"
OWN_REWARD = "+env.mine={target: [examples/custom/reward.py:even_digits], num_workers: 0}"


@cache
def keys(*overrides: str, exemplar: str = EXEMPLAR):
    """Both sections that an algorithm is set up by."""
    config = load_grpo_config(exemplar, overrides)
    return config.grpo, config.loss_fn


def both(settings, now, batch, norm, expected: Tensor) -> None:
    """The loss has the value and the gradient of `expected`, a function of `now`."""
    loss, _ = ClippedPGLoss(settings)(now, batch, norm)
    torch.testing.assert_close(loss, expected)
    (ours,), (theirs,) = torch.autograd.grad(loss, now), torch.autograd.grad(expected, now)
    assert theirs.abs().max() > 1e-3
    torch.testing.assert_close(ours, theirs)


def clipped(now, batch, low: float, high: float) -> Tensor:
    """The clipped objective of each token, as a loss."""
    ratio = (now - batch.prev_logprobs).exp()
    return -torch.minimum(ratio * batch.advantages, ratio.clamp(1 - low, 1 + high) * batch.advantages)


def kept(batch) -> Tensor:
    return batch.token_mask * batch.sample_mask[:, None]


def test_dr_grpo_is_the_sum_over_tokens_by_a_constant_times_the_number_of_responses_as_in_trl_and_verl():
    grpo, loss = keys(
        NO_KL, "loss_fn.token_level_loss=false", "loss_fn.constant_length_divisor=${policy.generation.max_new_tokens}",
        "grpo.normalize_rewards=false", "grpo.use_leave_one_out_baseline=false", "policy.generation.max_new_tokens=32",
    )  # fmt: skip
    now, batch, norm = random_batch(1)
    total = (clipped(now, batch, 0.2, 0.2) * kept(batch)).sum()
    both(loss, now, batch, norm, total / (batch.sample_mask.sum() * 32))
    rewards = torch.tensor([[1.0, 0.0, 0.0, 2.0]])
    advantages = token_advantages(grpo, rewards, torch.ones(4, 3))
    torch.testing.assert_close(advantages, (rewards - rewards.mean()).reshape(4, 1).expand(4, 3))


def test_cispo_weights_the_logprob_of_each_token_by_the_clipped_ratio_as_in_nemo_rl():
    _, loss = keys(NO_KL, "loss_fn.use_cispo=true", "loss_fn.ratio_clip_min=0.1", "loss_fn.ratio_clip_max=0.15")
    now, batch, norm = random_batch(2)
    weight = (now - batch.prev_logprobs).exp().clamp(0.9, 1.15).detach()
    assert ((weight == 0.9) | (weight == 1.15)).any()
    per_token = -weight * batch.advantages * now
    both(loss, now, batch, norm, (per_token * kept(batch)).sum() / kept(batch).sum())


def test_cispo_without_a_lower_clip_is_trls_whose_bound_is_the_ratio_itself():
    _, loss = keys(NO_KL, "loss_fn.use_cispo=true", "loss_fn.ratio_clip_min=1", "loss_fn.ratio_clip_max=0.1")
    now, batch, norm = random_batch(3)
    weight = (now - batch.prev_logprobs).exp().clamp(max=1.1).detach()
    both(loss, now, batch, norm, (-weight * batch.advantages * now * kept(batch)).sum() / kept(batch).sum())


def test_without_a_ratio_the_loss_is_reinforces():
    _, loss = keys(NO_KL, "loss_fn.disable_ppo_ratio=true", "loss_fn.token_level_loss=false")
    now, batch, norm = random_batch(4)
    by_response = (-batch.advantages * now * kept(batch)).sum(dim=1) / kept(batch).sum(dim=1).clamp(min=1)
    both(loss, now, batch, norm, by_response.sum() / batch.sample_mask.sum())


def masked_weights(kind: str, weight: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    """NeMo-RL's three ways with weights out of bounds."""
    if kind == "tis":
        return weight.clamp(low, high)
    if kind == "icepop":
        return torch.where((weight >= low) & (weight <= high), weight, torch.zeros_like(weight))
    mean = ((weight.log() * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).exp()
    return weight * ((mean >= low) & (mean <= high))[:, None]


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_importance_weights_out_of_bounds_are_clamped_masked_or_mask_their_response(kind):
    _, loss = keys(
        NO_KL, "loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_ratio=1.1",
        "loss_fn.truncated_importance_sampling_ratio_min=0.9", f"loss_fn.truncated_importance_sampling_type={kind}",
    )  # fmt: skip
    now, batch, norm = random_batch(5, rows=12)
    raw = (batch.prev_logprobs - batch.generation_logprobs).exp()
    weight = masked_weights(kind, raw, batch.token_mask, 0.9, 1.1)
    changed = (weight != raw) & (kept(batch) == 1)
    assert changed.any()
    assert not changed[kept(batch) == 1].all()
    per_token = weight * clipped(now, batch, 0.2, 0.2)
    both(loss, now, batch, norm, (per_token * kept(batch)).sum() / kept(batch).sum())
    _, metrics = ClippedPGLoss(loss)(now, batch, norm)
    share = changed.any(dim=1).sum() / batch.sample_mask.sum() if "seq" in kind else changed.sum() / kept(batch).sum()
    assert metrics["is_oob_ratio"].item() == pytest.approx(share.item())


def reinforce_plus_plus(rewards: Tensor, groups: Tensor, mask: Tensor, kl: Tensor | None, *, baseline: bool) -> Tensor:
    """NeMo-RL's ReinforcePlusPlusAdvantageEstimator; with a KL weighted already."""
    means = torch.stack([rewards[groups == group].mean() for group in groups])
    advantages = (rewards - means if baseline else rewards)[:, None].expand(mask.shape)
    if kl is not None:
        advantages = advantages - kl
    mean = (advantages * mask).sum() / mask.sum()
    variance = ((advantages - mean) ** 2 * mask).sum() / mask.sum()
    return (advantages - mean) * variance.clamp(min=1e-8).rsqrt()


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("kl_type", [None, "k1", "k2", "k3"])
def test_reinforce_plus_plus_normalizes_over_all_tokens_and_takes_the_kl_out_of_rewards_as_in_nemo_rl(
    baseline, kl_type
):
    in_reward = kl_type is not None
    grpo, loss = keys(
        "grpo.adv_estimator.name=reinforce_plus_plus", f"grpo.adv_estimator.minus_baseline={baseline}",
        f"loss_fn.use_kl_in_reward={in_reward}", f"loss_fn.reference_policy_kl_type={kl_type or 'k3+'}",
        f"loss_fn.reference_policy_kl_penalty={0.3 if in_reward else 0}",
    )  # fmt: skip
    now, batch, norm = random_batch(6)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0, -1.0, 2.0])
    log_r = batch.reference_logprobs - batch.prev_logprobs
    values = {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}
    kl = 0.3 * values[kl_type].clamp(-10, 10) if kl_type is not None else None
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    expected = reinforce_plus_plus(rewards.double(), groups, kept(batch), kl, baseline=baseline)
    penalty = ClippedPGLoss(loss).kl_in_reward(batch.prev_logprobs, batch.reference_logprobs)
    found = token_advantages(grpo, rewards.reshape(2, 3), kept(batch), penalty)
    counted = kept(batch) == 1
    torch.testing.assert_close(found[counted], expected[counted].float())
    # The KL is in the reward and has no gradient of its own.
    with_advantages = replace(batch, advantages=expected.masked_fill(~counted, 0.0))
    total = (clipped(now, with_advantages, 0.2, 0.2) * kept(batch)).sum()
    both(loss, now, with_advantages, norm, total / kept(batch).sum())


@hypothesis_settings(max_examples=60)
@given(
    rewards=st.lists(st.floats(-5, 5, width=32), min_size=6, max_size=6),
    lengths=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    baseline=st.booleans(),
)
def test_reinforce_plus_plus_has_mean_0_and_variance_1_over_counted_tokens_unless_all_are_equal(
    rewards, lengths, baseline
):
    grpo, _ = keys("grpo.adv_estimator.name=reinforce_plus_plus", f"grpo.adv_estimator.minus_baseline={baseline}")
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).float()
    found = token_advantages(grpo, torch.tensor(rewards).reshape(2, 3), mask).double()
    assert torch.isfinite(found).all()
    counted = found[mask == 1]
    if len(counted):
        assert counted.mean().item() == pytest.approx(0.0, abs=1e-5)
        variance = counted.var(correction=0).item()
        assert variance == pytest.approx(1.0, abs=1e-3) or variance < 1.0  # of less than 1e-8 before


@pytest.mark.parametrize(("low", "high"), [(None, None), (-0.5, None), (None, 0.7), (-0.5, 0.7)])
@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_advantages_are_clipped_after_all_else(name, low, high):
    bounds = [f"grpo.advantage_clip_{side}={'null' if b is None else b}" for side, b in (("low", low), ("high", high))]
    free, _ = keys(f"grpo.adv_estimator.name={name}")
    grpo, _ = keys(f"grpo.adv_estimator.name={name}", *bounds)
    rewards, mask = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]]), torch.ones(8, 3)
    plain = token_advantages(free, rewards, mask)
    assert plain.min() < -0.5
    assert plain.max() > 0.7
    expected = plain.clamp(-math.inf if low is None else low, math.inf if high is None else high)
    assert torch.equal(token_advantages(grpo, rewards, mask), expected)


def as_sampled(batch) -> SampledBatch:
    names = ("input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs")
    return SampledBatch(**{name: getattr(batch, name) for name in names})


def test_responses_above_the_error_threshold_are_left_out_as_in_nemo_rl():
    grpo, _ = keys("grpo.seq_logprob_error_threshold=1.25")
    _, batch, _ = random_batch(7, rows=12)
    errors = [
        (batch.generation_logprobs - batch.prev_logprobs).abs()[row][batch.token_mask[row] == 1].exp().mean().item()
        for row in range(len(batch))
    ]
    sampled = as_sampled(batch)
    assert grpo.seq_logprob_error_threshold == 1.25
    found, metrics = without_disagreement(sampled, batch.prev_logprobs, grpo.seq_logprob_error_threshold)
    expected = [float(error <= 1.25 and kept) for error, kept in zip(errors, batch.sample_mask.tolist(), strict=True)]
    assert 0 < sum(expected) < sum(batch.sample_mask.tolist())
    assert found.sample_mask.tolist() == expected
    counted = [error for error, kept in zip(errors, batch.sample_mask.tolist(), strict=True) if kept]
    assert metrics == pytest.approx(
        {
            "mean_seq_mult_prob_error": sum(counted) / len(counted),
            "max_seq_mult_prob_error": max(counted),
            "num_masked_seqs_by_logprob_error": sum(batch.sample_mask.tolist()) - sum(expected),
        }
    )
    same, metrics = without_disagreement(sampled, batch.prev_logprobs, None)
    assert torch.equal(same.sample_mask, batch.sample_mask)
    assert "num_masked_seqs_by_logprob_error" not in metrics
    nothing, metrics = without_disagreement(
        replace(sampled, sample_mask=torch.zeros(12, dtype=torch.float64)), batch.prev_logprobs, 1.25
    )
    assert not nothing.sample_mask.any()
    assert metrics["num_masked_seqs_by_logprob_error"] == 0


def test_the_dapo_exemplar_is_the_clipped_loss_over_all_tokens_with_a_wider_upper_clip_and_no_kl():
    grpo, loss = keys(exemplar="examples/configs/dapo_math_1B.yaml")
    now, batch, norm = random_batch(8)
    per_token = clipped(now, batch, 0.2, 0.28)
    both(loss, now, batch, norm, (per_token * kept(batch)).sum() / kept(batch).sum())
    assert grpo.use_dynamic_sampling
    assert grpo.reward_shaping.enabled
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    expected = (rewards - rewards.mean()) / rewards.std()
    found = token_advantages(grpo, rewards, torch.ones(4, 1)).reshape(1, 4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_the_gspo_exemplar_is_the_clipped_ratio_of_whole_responses_as_in_the_paper_and_verl():
    _, loss = keys(exemplar="examples/configs/gspo_math_1B.yaml")
    now, batch, norm = random_batch(9)
    # Ratios as close to 1 as the clip: a hundredth of the differences of the batch.
    near = replace(batch, prev_logprobs=now.detach() + (batch.prev_logprobs - now.detach()) / 200)
    lengths = kept(batch).sum(dim=1).clamp(min=1)
    mean = ((now - near.prev_logprobs) * kept(batch)).sum(dim=1) / lengths
    # verl: the value of the response's ratio on each token, with the gradient of that token's logprob.
    ratio = (now - now.detach() + mean.detach()[:, None]).exp()
    bounded = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    is_out = (ratio != bounded) & (kept(batch) == 1)
    assert is_out.any()
    assert not is_out[kept(batch) == 1].all()
    per_token = torch.maximum(-batch.advantages * ratio, -batch.advantages * bounded)
    by_response = (per_token * kept(batch)).sum(dim=1) / lengths
    both(loss, now, near, norm, by_response.sum() / batch.sample_mask.sum())


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("weights", [None, (0.5, 2.0)])
def test_gdpo_compares_each_part_of_a_reward_and_normalizes_their_sum_as_in_nemo_rl(leave_one_out, normalize, weights):
    grpo, loss = keys(
        NO_KL, "grpo.adv_estimator.name=gdpo", f"grpo.use_leave_one_out_baseline={leave_one_out}",
        f"grpo.normalize_rewards={normalize}", OWN_REWARD,
        f"grpo.adv_estimator.reward_weights={'null' if weights is None else list(weights)}",
    )  # fmt: skip
    now, batch, norm = random_batch(10)
    parts = {  # in another order than that of names, which the weights have
        "right": torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]),
        "form": torch.tensor([[0.2, 0.9, 0.4], [0.0, -1.0, 3.0]]),
    }
    total = torch.zeros(2, 3, dtype=torch.float64)
    for name, weight in zip(("form", "right"), weights or (1.0, 1.0), strict=True):
        for row, group in enumerate(parts[name].double()):
            for one, reward in enumerate(group):
                compared = torch.stack([r for other, r in enumerate(group) if not (leave_one_out and other == one)])
                # calculate_baseline_and_std_per_prompt, and division where the deviation is above 0
                deviation = compared.std() if normalize else torch.zeros(())
                distance = reward - compared.mean()
                total[row, one] += weight * (distance / (deviation + 1e-6) if deviation > 0 else distance)
    expected = (total - total.mean()) / total.std()
    found = token_advantages(grpo, torch.zeros(2, 3), kept(batch), None, parts)
    torch.testing.assert_close(found.double(), expected.reshape(6, 1).expand(found.shape), rtol=1e-4, atol=1e-5)
    with_advantages = replace(batch, advantages=expected.reshape(6, 1).expand(batch.advantages.shape))
    total_loss = (clipped(now, with_advantages, 0.2, 0.2) * kept(batch)).sum()
    both(loss, now, with_advantages, norm, total_loss / kept(batch).sum())


def test_gdpo_without_differences_has_no_advantage_and_without_parts_says_what_is_missing():
    grpo, _ = keys("grpo.adv_estimator.name=gdpo", OWN_REWARD)
    same = torch.full((2, 3), 0.1)
    assert not token_advantages(grpo, same, torch.ones(6, 2), None, {"a": same, "b": same}).any()
    with pytest.raises(ConfigError, match=r"gdpo, which compares parts of rewards, but rewards have the part a only"):
        token_advantages(grpo, same, torch.ones(6, 2), None, {"a": same})
    weighted, _ = keys("grpo.adv_estimator.name=gdpo", OWN_REWARD, "grpo.adv_estimator.reward_weights=[1.0]")
    with pytest.raises(ConfigError, match=r"reward_weights has 1 numbers, but rewards have the parts a, b; write one"):
        token_advantages(weighted, same, torch.ones(6, 2), None, {"b": same, "a": same})


def test_positive_examples_add_their_mean_negative_logprob_as_in_vapo_whatever_the_micro_batches():
    _, loss = keys(NO_KL, "loss_fn.positive_example_nll_weight=0.1")
    now, batch, norm = random_batch(11)
    positive = kept(batch) * (batch.rewards > 0)[:, None]
    assert 0 < positive.sum() < kept(batch).sum()
    objective = (clipped(now, batch, 0.2, 0.2) * kept(batch)).sum() / kept(batch).sum()
    expected = objective + 0.1 * -(now * positive).sum() / positive.sum()
    both(loss, now, batch, norm, expected)
    shares = [ClippedPGLoss(loss)(now[rows], batch.select(rows), norm) for rows in ([0, 1], [2, 3, 4], [5])]
    torch.testing.assert_close(torch.stack([share for share, _ in shares]).sum(), expected)
    nll = torch.stack([metrics["positive_nll_loss"] for _, metrics in shares]).sum()
    torch.testing.assert_close(nll, -(now.detach() * positive).sum() / positive.sum())


def test_tokens_outside_the_policys_nucleus_are_no_disagreement_but_a_step_of_mostly_such_tokens_is():
    _, batch, _ = random_batch(7)
    agreed = replace(as_sampled(batch), generation_logprobs=batch.prev_logprobs)
    prev = batch.prev_logprobs.clone()
    prev[:, 1] = -math.inf
    found, metrics = without_disagreement(agreed, prev, 1.001)
    assert torch.equal(found.sample_mask, batch.sample_mask)
    assert metrics["max_seq_mult_prob_error"] == 1.0
    assert metrics["num_masked_seqs_by_logprob_error"] == 0

    assert disagreement(3, 1.0, 0.3, 1.5) is None
    assert disagreement(3, 1.0, 1.0, None) is None
    assert "step 3: 60% of the tokens that the engine sampled" in (disagreement(3, 1.2, 0.6, 1.6) or "")
    assert "above distillation.max_token" in (disagreement(3, 1.7, 0.0, 1.5, "distillation") or "")
    # Of tokens inside the error is 1.8: those outside count 1 in the mean over all.
    assert "(token_mult_prob_error is 1.8 where 1 is agreement)" in (disagreement(3, 1.4, 0.5, 1.5) or "")


def test_distillation_compares_engine_and_student_on_tokens_in_the_students_nucleus():
    _, batch, norm = random_batch(4)
    sampled = as_sampled(batch)
    made = TopKBatch(**vars(sampled), teacher_logprobs=torch.zeros(6, 7, 1), teacher_ids=torch.zeros(6, 7, 1))
    logprobs = sampled.generation_logprobs.clone()
    logprobs[0, 1] = -math.inf
    loss = DistillationLoss(DistillationLossConfig(kl_type="forward", mixed_kl_weight=0.5, zero_outside_topk=False))
    ones = torch.ones_like(logprobs)
    metrics = loss.measure(DivergenceScores(ones, logprobs, ones), made, norm)
    mask = batch.loss_mask.clone()
    mask[0, 1] = 0
    assert metrics["token_mult_prob_error"].item() == pytest.approx(1.0)
    assert metrics["outside_nucleus_rate"].item() == pytest.approx(1 / norm.num_valid_tokens)
    expected = -(logprobs.masked_fill(mask == 0, 0.0)).sum() / norm.num_valid_tokens
    assert metrics["sampled_nll"].item() == pytest.approx(expected.item())
