import math

import pytest

from nemo_offload_rl.algorithms.dynamic_sampling import drop_constant_groups, sample_until_full
from nemo_offload_rl.data.records import Prompt
from nemo_offload_rl.environments.interfaces import Unscored
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.experience.types import Rollout, RolloutBatch, Segment


def make_batch(rewards_PG: list[list[float | None]], name: str = "") -> RolloutBatch:
    rollouts = [
        Rollout(
            prompt=Prompt(token_ids=(1,), text=f"{name}{group}", reference_answer="", env_name="e"),
            segments=(Segment(token_ids=(2,), logprobs=(-1.0,)),),
            response_text="",
            reward=math.nan if reward is None else reward,
            correct=reward is not None and reward > 0,
            unscored=Unscored("failed") if reward is None else None,
            truncated=False,
        )
        for group, rewards in enumerate(rewards_PG)
        for reward in rewards
    ]
    return RolloutBatch(rollouts=tuple(rollouts), group_size=len(rewards_PG[0]))


def names(batch: RolloutBatch) -> list[str]:
    return [rollout.prompt.text for rollout in batch.rollouts[:: batch.group_size]]


def test_groups_with_equal_rewards_are_dropped_whole():
    kept = drop_constant_groups(make_batch([[0, 0], [1, 0], [1, 1], [0.1, 0.1], [0, 1]]))
    assert kept.rewards_PG().tolist() == [[1, 0], [0, 1]]
    assert names(kept) == ["1", "4"]


def test_rollouts_without_a_score_make_no_group_differ_and_keep_none_out():
    kept = drop_constant_groups(make_batch([[1, 1, None], [None, 1, 0], [None, None, 1], [None, None, None]]))
    assert names(kept) == ["1"]


def test_batches_are_drawn_until_the_step_is_full_and_the_rest_is_sampled_but_not_trained_on():
    batches = iter(
        [make_batch([[0, 0], [1, 0]], "a"), make_batch([[1, 1], [0, 0]], "b"), make_batch([[1, 0], [0, 1]], "c")]
    )
    groups = sample_until_full(batches, num_prompts=2, max_batches=5)
    assert groups is not None
    assert names(groups.trained) == ["a1", "c0"]
    assert names(groups.sampled) == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert groups.num_batches == 3


def test_data_that_end_before_the_step_is_full_give_no_step():
    assert sample_until_full(iter([make_batch([[1, 0], [1, 1]])] * 2), num_prompts=3, max_batches=3) is None


def test_too_few_useful_groups_are_an_error_that_says_how_many_there_were():
    with pytest.raises(DataError, match="found 3 of 4 groups with differing rewards in 3 batches"):
        sample_until_full(iter([make_batch([[1, 0], [1, 1]])] * 9), num_prompts=4, max_batches=3)
