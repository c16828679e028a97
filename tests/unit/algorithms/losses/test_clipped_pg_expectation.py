"""What the loss follows in expectation: all responses of two tokens over a small vocabulary, each as often as sampled.

The exact quantities are those of whole distributions: the expected reward, the expected sum of the divergences at both
positions, and their gradients by the logits.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from pg_cases import PLAIN

from nemo_offload_rl.algorithms.advantages import group_advantages
from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch
from nemo_offload_rl.runs.loading import load_grpo_config

EXEMPLAR = "examples/configs/grpo_math_1B.yaml"
VOCABULARY = 3
RESPONSES = list(itertools.product(range(VOCABULARY), repeat=2))
REWARDS = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0, -1.0, 0.7, 0.2, -2.0], dtype=torch.float64)


def model(seed: int, scale: float = 1.0) -> torch.Tensor:
    """[1 + V, V] logits: of the first token, and of the second after each first."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn((1 + VOCABULARY, VOCABULARY), generator=generator, dtype=torch.float64)


def token_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """[B, 3]: of both tokens of all responses; column 0 is a prompt's."""
    table = logits.log_softmax(-1)
    rows = [torch.stack([table[0, 0] * 0, table[0, first], table[1 + first, second]]) for first, second in RESPONSES]
    return torch.stack(rows)


def expected_reward(logits: torch.Tensor) -> torch.Tensor:
    return (token_logprobs(logits).sum(dim=1).exp() * REWARDS).sum()


def divergences(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Of the first token, plus of the second for each first, as often as that is sampled (which has no gradient)."""
    policy, other = logits.log_softmax(-1), reference.log_softmax(-1)
    by_position = (policy.exp() * (policy - other)).sum(dim=1)
    return by_position[0] + (policy[0].exp().detach() * by_position[1:]).sum()


def followed(settings, logits: torch.Tensor, sampler: torch.Tensor, reference: torch.Tensor, advantages=REWARDS):
    """The mean gradient of the loss by the logits, where the engine samples from `sampler`."""
    now = token_logprobs(logits)
    sampled, size = token_logprobs(sampler).detach(), len(RESPONSES)
    batch = PolicyGradientBatch(
        input_ids=torch.zeros((size, 3), dtype=torch.int64),
        input_lengths=torch.full((size,), 3),
        token_mask=torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64).expand(size, 3),
        sample_mask=torch.ones(size, dtype=torch.float64),
        rewards=torch.ones(size),
        advantages=advantages if advantages.dim() == 2 else advantages[:, None].expand(size, 3),
        prev_logprobs=now.detach(),
        generation_logprobs=sampled,
        reference_logprobs=token_logprobs(reference).detach(),
    )
    loss = torch.zeros((), dtype=torch.float64)
    for row, how_often in enumerate(sampled.sum(dim=1).exp()):
        share, _ = ClippedPGLoss(settings)(now[[row]], batch.select([row]), LossNorm(1.0, 2.0))
        loss = loss + how_often * share
    return torch.autograd.grad(loss, logits)[0]


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def test_the_exemplars_loss_follows_the_expected_reward_minus_the_divergence_with_its_weight():
    settings = replace(load_grpo_config(EXEMPLAR).loss_fn, reference_policy_kl_penalty=0.7)
    # So far apart that `kl_output_clamp_value` acts on some tokens.
    logits, reference = model(0, 2.0).requires_grad_(), model(1, 2.0)
    assert (token_logprobs(reference) - token_logprobs(logits)).max() > 3
    wanted = -gradient(expected_reward(logits), logits) + 0.7 * gradient(divergences(logits, reference), logits)
    torch.testing.assert_close(followed(settings, logits, logits.detach(), reference), wanted / 2)  # mean of two tokens


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"token_level_loss": False},
        {"token_level_loss": False, "sequence_level_importance_ratios": True},
        {"force_on_policy_ratio": True},
        {"ratio_clip_c": 3.0},
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0},
        {"token_level_loss": False, "constant_length_divisor": 2},
        {"use_cispo": True},
        {"disable_ppo_ratio": True},
        *(
            {
                "use_importance_sampling_correction": True,
                "truncated_importance_sampling_type": kind,
                "truncated_importance_sampling_ratio": 2.0,
                "truncated_importance_sampling_ratio_min": 0.5,
            }
            for kind in ("tis", "icepop", "seq-mask-tis")
        ),
    ],
)
def test_on_policy_every_variant_follows_the_expected_reward(keys):
    logits = model(2).requires_grad_()
    wanted = -gradient(expected_reward(logits), logits) / 2
    torch.testing.assert_close(followed(replace(PLAIN, **keys), logits, logits.detach(), logits.detach()), wanted)


def test_with_one_untruncated_weight_for_each_response_another_sampler_changes_nothing():
    logits, sampler = model(3).requires_grad_(), model(4)
    keys = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    settings = replace(PLAIN, use_importance_sampling_correction=True, **keys)
    wanted = -gradient(expected_reward(logits), logits) / 2
    torch.testing.assert_close(followed(settings, logits, sampler, sampler), wanted)
    uncorrected = followed(replace(PLAIN, **keys), logits, sampler, sampler)
    assert (uncorrected - wanted).norm() > 0.1 * wanted.norm()


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3", "k1+", "k3+"])
def test_with_the_on_policy_approximation_another_sampler_leaves_the_gradient_of_the_divergence_at_each_position(
    kl_type,
):
    """The first token shows it; which tokens come before the second is up to the sampler."""
    logits, sampler, reference = model(5).requires_grad_(), model(6), model(7)
    settings = replace(
        PLAIN, reference_policy_kl_penalty=1.0, reference_policy_kl_type=kl_type, kl_output_clamp_value=None,
        use_on_policy_kl_approximation=True,
    )  # fmt: skip
    slope = followed(settings, logits, sampler, reference, advantages=torch.zeros_like(REWARDS))
    wanted = gradient(divergences(logits, reference), logits) / 2
    torch.testing.assert_close(slope[0], wanted[0])


@pytest.mark.parametrize("kl_type", ["k1", "k1+"])
def test_the_kl_in_the_reward_leaves_the_gradient_of_the_divergence_at_each_position(kl_type):
    logits, reference = model(9).requires_grad_(), model(10)
    settings = replace(
        PLAIN, reference_policy_kl_penalty=0.7, reference_policy_kl_type=kl_type, use_kl_in_reward=True,
        kl_output_clamp_value=None,
    )  # fmt: skip
    penalty = ClippedPGLoss(settings).kl_in_reward(token_logprobs(logits).detach(), token_logprobs(reference))
    assert penalty is not None
    slope = followed(settings, logits, logits.detach(), reference, advantages=REWARDS[:, None] - penalty)
    wanted = -gradient(expected_reward(logits), logits) + 0.7 * gradient(divergences(logits, reference), logits)
    torch.testing.assert_close(slope, wanted / 2)


def test_with_responses_of_several_lengths_only_the_constant_divisor_follows_the_expected_reward():
    """A response ends with its first token if that is 0: it has one token then, and two otherwise."""
    logits = model(11).requires_grad_()
    table = logits.log_softmax(-1)
    responses = [(0,), *((first, second) for first in (1, 2) for second in range(VOCABULARY))]
    rewards = torch.tensor([1.5, -0.5, 0.3, 2.0, 0.0, -1.0, 0.7], dtype=torch.float64)
    rows = [[table[0, first], *(table[1 + first, second] for second in rest)] for first, *rest in responses]
    how_often = torch.stack([torch.stack(row).sum().exp() for row in rows])
    wanted = gradient((how_often * rewards).sum(), logits)
    found = {}
    for divisor in (None, 5):
        settings, total = replace(PLAIN, token_level_loss=False, constant_length_divisor=divisor), 0.0
        for row, share, reward in zip(rows, how_often.detach(), rewards, strict=True):
            now = torch.stack([table[0, 0] * 0, *row])[None]
            batch = PolicyGradientBatch(
                input_ids=torch.zeros(now.shape, dtype=torch.int64),
                input_lengths=torch.tensor([now.shape[1]]),
                token_mask=torch.tensor([[0.0] + [1.0] * len(row)], dtype=torch.float64),
                sample_mask=torch.ones(1, dtype=torch.float64),
                rewards=torch.ones(1),
                advantages=reward.expand(now.shape),
                prev_logprobs=now.detach(),
                generation_logprobs=now.detach(),
                reference_logprobs=now.detach(),
            )
            total = total + share * ClippedPGLoss(settings)(now, batch, LossNorm(1.0, len(row)))[0]
        found[divisor] = torch.autograd.grad(total, logits, retain_graph=True)[0]
    torch.testing.assert_close(found[5], -wanted / 5)
    direction = torch.nn.functional.cosine_similarity(found[None].flatten(), -wanted.flatten(), dim=0)
    assert direction < 0.99


@pytest.mark.parametrize(("leave_one_out", "factor"), [(True, 1.0), (False, 2 / 3)])
def test_group_baselines_leave_the_expected_gradient_or_shrink_it_by_the_share_of_the_others(leave_one_out, factor):
    """Over all groups of three responses of one token: the mean of the group has the response's own reward in it."""
    logits = model(8)[0].requires_grad_()
    logprobs, rewards = logits.log_softmax(0), torch.tensor([1.0, 0.0, -0.5])
    wanted = torch.autograd.grad((logprobs.exp() * rewards).sum(), logits, retain_graph=True)[0]
    found = torch.zeros_like(wanted)
    for group in itertools.product(range(VOCABULARY), repeat=3):
        advantages = group_advantages(rewards[list(group)][None], leave_one_out=leave_one_out, normalize=False)[0]
        objective = (advantages * logprobs[list(group)]).mean()
        how_often = logprobs.detach()[list(group)].sum().exp()
        found += how_often * torch.autograd.grad(objective, logits, retain_graph=True)[0]
    torch.testing.assert_close(found, factor * wanted, rtol=1e-6, atol=1e-7)
