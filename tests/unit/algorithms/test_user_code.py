"""A user's own loss, advantages and choice of rollouts."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch
from local_grpo import make_prompts

from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.algorithms.user_code import GrpoCode, UserLoss, example_batch
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch
from nemo_offload_rl.environments.interfaces import Observation, Response, Score, Unscored
from nemo_offload_rl.errors import ConfigError, UserCodeError
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, Segment
from nemo_offload_rl.keys.data import EnvConfig
from nemo_offload_rl.runs.environments import load_code
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.targets import UserCode
from nemo_offload_rl.utils.metric_sinks import user_sinks

CONFIG = load_grpo_config("examples/configs/grpo_math_1B.yaml")
CLIPPED = ClippedPGLoss(CONFIG.loss_fn)


def rollouts(num_prompts: int = 2, group_size: int = 2) -> RolloutBatch:
    prompts = make_prompts(["x"] * num_prompts)
    made = [
        Rollout(
            prompt=prompt, segments=(Segment(token_ids=(5,) * (row + 1), logprobs=(-1.0,) * (row + 1)),),
            response_text="5", reward=float(row), correct=bool(row), truncated=row == 0,
        )
        for prompt in prompts for row in range(group_size)
    ]  # fmt: skip
    return RolloutBatch(rollouts=tuple(made), group_size=group_size)


REWARDS = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
MASK = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logprobs, batch: logprobs.sum(), r"cannot be called as <lambda>\(logprobs, batch, norm\)"),
        (lambda logprobs, batch, norm: logprobs, r"returned a tensor of shape \(2, 4\); return a tensor of no dimen"),
        (lambda logprobs, batch, norm: 1.0, "returned a float"),
        (lambda logprobs, batch, norm: logprobs.sum().detach(), "its loss has no gradient"),
        (lambda logprobs, batch, norm: logprobs.sum() / 0, "its loss is -inf where all logprobs are finite"),
        (lambda logprobs, batch, norm: (logprobs.sum(), {"a": logprobs}), r"'a' is a tensor of shape .* one number"),
        (lambda logprobs, batch, norm: (logprobs.sum(), {"a": "1"}), "'a' is a str; make it one number"),
        (lambda logprobs, batch, norm: (logprobs.sum(), {"kl": 1.0}), "'kl' is measured already"),
        (lambda logprobs, batch, norm: batch.advantage.sum(), "AttributeError: .* at .*test_user_code.py"),
    ],
)
def test_a_loss_is_tried_before_anything_starts(function, message):
    with pytest.raises(UserCodeError, match=message):
        UserLoss(UserCode("loss_fn.target", function), CLIPPED).check(example_batch(PolicyGradientBatch))


def test_a_loss_travels_and_is_measured_beside_the_metrics_of_the_clipped_one():
    factor = 3.0
    code = UserCode("loss", lambda logprobs, batch, norm: (factor * logprobs.sum(), {"mine": 2.0}))
    loss, batch = UserLoss(code, CLIPPED, ("loss", "actor_loss")), example_batch(PolicyGradientBatch)
    loss.check(batch)
    again = pickle.loads(pickle.dumps(loss))
    assert again.standard == CLIPPED
    again.check(batch)
    logprobs, norm = torch.full((2, 4), -1.0), LossNorm(2.0, 4.0)
    _, metrics = again(logprobs, batch, norm)
    _, plain = CLIPPED(logprobs, batch, norm)
    assert {name: value.item() for name, value in metrics.items()} == {
        **{name: value.item() for name, value in plain.items()}, "loss": -24.0, "actor_loss": -24.0, "mine": 2.0,
    }  # fmt: skip


def test_a_loss_gets_tokens_outside_the_policys_nucleus_masked_and_meets_no_infinity():
    seen = []

    def plain(logprobs, batch, norm):
        seen.append((logprobs, batch))
        return -(logprobs * batch.prev_logprobs * batch.loss_mask).sum() / norm.num_valid_tokens

    batch = example_batch(PolicyGradientBatch)
    logprobs, prev = torch.full((2, 4), -1.0), batch.prev_logprobs.clone()
    logprobs[0, 1] = prev[1, 2] = -torch.inf
    loss, metrics = UserLoss(UserCode("loss", plain), CLIPPED)(
        logprobs.requires_grad_(), replace(batch, prev_logprobs=prev), LossNorm(2.0, 4.0)
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite() and gradient.isfinite().all()
    assert not gradient[0, 1] and not gradient[1, 2] and gradient[0, 2]
    ((given, masked),) = seen
    assert given[0, 1] == masked.prev_logprobs[1, 2] == masked.token_mask[0, 1] == masked.token_mask[1, 2] == 0
    assert metrics["outside_nucleus_rate"] == 0.5 and all(value.isfinite() for value in metrics.values())


def test_advantages_are_the_functions_by_response_or_by_token():
    def centred(rewards, lengths):
        assert lengths.tolist() == [[1, 2], [1, 2]]
        return rewards - 0.5

    by_response = GrpoCode(adv_estimator=UserCode("a", centred)).advantages(rollouts(), REWARDS, MASK)
    assert by_response is not None
    assert by_response.tolist() == [[-0.5] * 3, [0.5] * 3] * 2
    by_token = GrpoCode(adv_estimator=UserCode("a", lambda mask: mask.cumsum(1))).advantages(rollouts(), REWARDS, MASK)
    assert by_token is not None
    assert by_token.tolist() == [[1.0, 2.0, 3.0]] * 4
    assert GrpoCode().advantages(rollouts(), REWARDS, MASK) is None


def test_advantages_of_a_function_leave_out_what_has_no_score():
    whole = rollouts()
    unscored = replace(whole.rollouts[1], reward=math.nan, unscored=Unscored("failed"))
    partly = replace(whole, rollouts=(whole.rollouts[0], unscored, *whole.rollouts[2:]))

    def mean_of(function):
        found = GrpoCode(adv_estimator=UserCode("a", function)).advantages(partly, partly.rewards_PG(), MASK)
        assert found is not None
        return found[:, 0].tolist()

    assert mean_of(lambda rewards: rewards - 0.5) == [-0.5, 0.0, -0.5, 0.5]
    assert mean_of(lambda scored: scored + 1.0) == [2.0, 0.0, 2.0, 2.0]
    # A mean that knows nothing of NaN leaves out the group.
    assert mean_of(lambda rewards: rewards - rewards.mean(1, keepdim=True)) == [0.0, 0.0, -0.5, 0.5]
    with pytest.raises(UserCodeError, match="leave out rewards of NaN"):
        mean_of(lambda rewards: rewards - rewards.mean())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rewards: rewards[0], r"shape \(2,\); return a tensor of shape \(2, 2\)"),
        (lambda rewards: rewards / 0, "not all fin"),
    ],
)
def test_other_advantages_are_told(function, message):
    with pytest.raises(UserCodeError, match=message):
        GrpoCode(adv_estimator=UserCode("a", function)).advantages(rollouts(), REWARDS, MASK)


def test_a_function_in_the_place_of_a_list_or_a_dictionary_is_told():
    with pytest.raises(UserCodeError, match="callbacks is a function; give a list"):
        user_sinks(CONFIG.logger, rollouts)
    with pytest.raises(UserCodeError, match="environments is a function; give a dictionary"):
        load_code(CONFIG.env, rollouts)


def test_weights_are_as_many_as_the_functions_that_python_gives():
    env = {"mine": EnvConfig(weights=(1.0, 0.5))}
    assert len(load_code(env, {"mine": [rollouts, rollouts]})["mine"]) == 2
    with pytest.raises(ConfigError, match=r"env\.mine\.weights has 2 numbers, but environments\['mine'\] has 1"):
        load_code(env, {"mine": rollouts})
    with pytest.raises(ConfigError, match=r"env\.mine is not an environment of this package"):
        load_code(env)


def test_a_filter_keeps_what_it_says_group_by_group():
    seen = []

    def keep(group):
        seen.append(len(group))
        return [not rollout.truncated for rollout in group]

    kept = GrpoCode(rollout_filter=UserCode("f", keep)).kept(rollouts())
    assert kept is not None
    assert kept.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert seen == [2, 2]
    with pytest.raises(UserCodeError, match="returned 1 answers for 2 rollouts"):
        GrpoCode(rollout_filter=UserCode("f", lambda group: [True])).kept(rollouts())
    with pytest.raises(UserCodeError, match="TypeError"):
        GrpoCode(rollout_filter=UserCode("f", lambda group: None)).kept(rollouts())


def test_a_hook_ends_a_rollout_by_a_boolean_or_with_a_score_of_its_own():
    response = Response(prompt_text="p", text="5", truncated=False, reference_answer="4", metadata={})
    observation = Observation("no", otherwise=Score(-1.0, correct=False))

    def answer(value):
        return GrpoCode(rollout_stop=UserCode("s", lambda response, observation: value)).stopped(response, observation)

    assert answer(True) == observation.otherwise
    assert answer(False) is None
    assert answer(Score(0.5, correct=True)) == Score(0.5, correct=True)
    assert GrpoCode().stopped(response, observation) is None
    with pytest.raises(UserCodeError, match="returned a float; return True to end the rollout, False to go on, or a"):
        answer(0.5)
