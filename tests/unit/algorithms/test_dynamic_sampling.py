import math

import pytest

from nemo_offload_rl.algorithms.advantages import group_advantages
from nemo_offload_rl.algorithms.dynamic_sampling import among_varied_others, in_varied_groups, sample_until_full
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
    kept = in_varied_groups(make_batch([[0, 0], [1, 0], [1, 1], [0.1, 0.1], [0, 1]]))
    assert kept.tolist() == [[False] * 2, [True] * 2, [False] * 2, [False] * 2, [True] * 2]


def test_rollouts_without_a_score_make_no_group_differ_and_keep_none_out():
    kept = in_varied_groups(make_batch([[1, 1, None], [None, 1, 0], [None, None, 1], [None, None, None]]))
    assert kept.tolist() == [[False] * 3, [True] * 3, [False] * 3, [False] * 3]


def test_a_response_is_dropped_by_itself_if_the_others_of_its_group_have_equal_rewards():
    # NeMo-RL's leave-one-out deviation of these rewards is 0 where False.
    rewards = [[1, 0, 0, 0], [1, 1, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0], [0.1, 0.1, 0.1, 0.7], [1, 0, None, 0]]
    kept = among_varied_others(make_batch(rewards)).int().tolist()
    assert kept == [[0, 1, 1, 1], [1, 1, 0, 1], [1] * 4, [0] * 4, [1, 1, 1, 0], [0, 1, 0, 1]]


def test_a_step_of_single_responses_is_as_large_as_its_groups_and_baselines_are_those_of_the_kept_parts():
    batches = iter([make_batch([[0, 0, 0], [1, 0, 0]], "a"), make_batch([[0, 1, 0.5], [1, 1, 0]], "b")])
    groups = sample_until_full(batches, num_prompts=2, max_batches=5, drops="responses")
    assert groups is not None and groups.places is not None
    assert groups.places.tolist() == [4, 5, 6, 7, 8, 9]  # 10, equal to 9, is surplus, and 11 the only wrong one
    assert groups.trained.rewards().tolist() == [0, 0, 0, 1, 0.5, 1] and len(groups.sampled) == 12
    rewards_PG = groups.in_groups(groups.trained.rewards())
    assert rewards_PG.tolist() == [[0] * 3, [0, 0, 0], [0, 1, 0.5], [1, 0, 0]]
    present_PG = groups.in_groups(groups.trained.scored())
    advantages_PG = group_advantages(rewards_PG, leave_one_out=True, normalize=False, scored_PG=present_PG)
    assert advantages_PG.reshape(-1)[groups.row_places()].tolist() == [0, 0, -0.75, 0.75, 0, 0]


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
    with pytest.raises(DataError, match="found 3 of 4 groups to learn from in 3 batches"):
        sample_until_full(iter([make_batch([[1, 0], [1, 1]])] * 9), num_prompts=4, max_batches=3)
