import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nemo_offload_rl.algorithms.advantages import (
    batch_advantages,
    decoupled_advantages,
    group_advantages,
    leave_one_out_baseline,
)

REWARDS_PG = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 2.0]])


def test_group_mean_baseline_without_normalization_centres_each_group():
    advantages = group_advantages(REWARDS_PG, leave_one_out=False, normalize=False)
    assert advantages.tolist() == [[0.75, -0.25, -0.25, -0.25], [0.0, 0.0, -1.0, 1.0]]


def test_group_normalization_divides_by_the_sample_standard_deviation():
    advantages = group_advantages(REWARDS_PG, leave_one_out=False, normalize=True)
    # squared deviations 0.5625 + 3 * 0.0625 = 0.75, divided by 3: std 0.5
    torch.testing.assert_close(advantages[0], torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=1e-5, atol=0)
    torch.testing.assert_close(advantages[1, 3], torch.tensor(1 / math.sqrt(2 / 3)), rtol=1e-5, atol=0)


def test_leave_one_out_baseline_is_the_mean_of_the_others():
    expected = torch.tensor([[0.0, 1 / 3, 1 / 3, 1 / 3], [1.0, 1.0, 4 / 3, 2 / 3]])
    torch.testing.assert_close(leave_one_out_baseline(REWARDS_PG), expected)
    advantages = group_advantages(REWARDS_PG, leave_one_out=True, normalize=False)
    torch.testing.assert_close(advantages, REWARDS_PG - expected)


def test_leave_one_out_advantages_are_divided_by_the_deviation_of_the_others_if_they_have_one():
    advantages = group_advantages(REWARDS_PG, leave_one_out=True, normalize=True)
    # The others of the one right response are equal: it keeps its distance. Those of a wrong one are 1, 0, 0.
    expected = torch.tensor([1.0, *[-(1 / 3) / math.sqrt(1 / 3)] * 3])
    torch.testing.assert_close(advantages[0], expected, rtol=1e-5, atol=0)
    one_of_16 = torch.tensor([[1.0, *[0.0] * 15]])
    assert group_advantages(one_of_16, leave_one_out=True, normalize=True)[0, 0] == 1.0


def test_a_group_of_two_is_not_divided_where_the_baseline_leaves_one_out():
    """One other has no deviation."""
    assert group_advantages(torch.tensor([[1.0, 0.0]]), leave_one_out=True, normalize=True).tolist() == [[1.0, -1.0]]


def nemo_rl_advantages(rewards: list[float], leave_one_out: bool) -> list[float]:
    """NeMo-RL's formula (calculate_baseline_and_std_per_prompt, GRPOAdvantageEstimator): by means of squares."""
    advantages = []
    for index in range(len(rewards)):
        compared = [r for other, r in enumerate(rewards) if not leave_one_out or other != index]
        count, mean = len(compared), statistics.fmean(compared)
        variance = statistics.fmean(r * r for r in compared) - mean * mean
        std = math.sqrt(variance * count / (count - 1)) if count > 1 and variance > 0 else 0.0
        distance = rewards[index] - mean
        advantages.append(distance / (std + 1e-6) if std > 0 else distance)
    return advantages


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_normalized_advantages_are_nemo_rls(leave_one_out):
    @hypothesis_settings(max_examples=100)
    @given(rewards=st.lists(st.integers(-4, 4).map(float), min_size=2, max_size=16))
    def check(rewards):
        found = group_advantages(torch.tensor([rewards]), leave_one_out=leave_one_out, normalize=True)[0].tolist()
        assert found == pytest.approx(nemo_rl_advantages(rewards, leave_one_out), rel=1e-4, abs=1e-5)

    check()


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -0.7])
def test_a_group_of_equal_rewards_gives_exactly_zero_even_where_its_mean_is_rounded(leave_one_out, normalize, reward):
    rewards = torch.full((1, 7), reward)
    advantages = group_advantages(rewards, leave_one_out=leave_one_out, normalize=normalize)
    assert advantages.tolist() == [[0.0] * 7]


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_group_of_one_gives_zero_and_no_nan(leave_one_out):
    advantages = group_advantages(torch.tensor([[3.0]]), leave_one_out=leave_one_out, normalize=True)
    assert advantages.tolist() == [[0.0]]


def advantages_by_hand(rewards: list[float], leave_one_out: bool, normalize: bool) -> list[float]:
    """One group in plain numbers."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    advantages = []
    for index, reward in enumerate(rewards):
        compared = [*rewards[:index], *rewards[index + 1 :]] if leave_one_out else rewards
        has_spread = normalize and len(set(compared)) > 1
        spread = statistics.stdev(compared) + 1e-6 if has_spread else 1.0
        advantages.append((reward - statistics.fmean(compared)) / spread)
    return advantages


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_rollouts_without_a_score_change_nothing_for_the_others_of_their_group(leave_one_out, normalize):
    @hypothesis_settings(max_examples=100)
    @given(groups=GROUPS, data=st.data())
    def check(groups, data):
        scored = [data.draw(st.lists(st.booleans(), min_size=len(group), max_size=len(group))) for group in groups]
        rewards_PG = torch.tensor(groups).masked_fill(~torch.tensor(scored), math.nan)
        settings = {"leave_one_out": leave_one_out, "normalize": normalize}
        found = group_advantages(rewards_PG, **settings, scored_PG=torch.tensor(scored))
        for row, rewards, has_score in zip(found, groups, scored, strict=True):
            smaller = [reward for reward, is_there in zip(rewards, has_score, strict=True) if is_there]
            assert not row[~torch.tensor(has_score)].any()
            expected = group_advantages(torch.tensor([smaller]), **settings)[0] if smaller else torch.zeros(0)
            assert torch.equal(row[torch.tensor(has_score)], expected)

    check()


def test_a_failed_rollout_makes_no_difference_where_all_others_got_the_same():
    for reward in (1.0, -1.0):
        rewards = torch.tensor([[reward, reward, reward, math.nan]])
        found = group_advantages(rewards, leave_one_out=False, normalize=True, scored_PG=~rewards.isnan())
        assert found.tolist() == [[0.0] * 4]


@pytest.mark.parametrize("minus_baseline", [False, True])
def test_reinforce_plus_plus_is_over_the_tokens_of_rollouts_with_a_score(minus_baseline):
    rewards = torch.tensor([[1.0, 0.0, math.nan], [2.0, 0.5, 0.0]])
    scored = ~rewards.isnan()
    mask_BS = scored.reshape(-1, 1).float().expand(6, 2)
    found = batch_advantages(rewards, mask_BS, minus_baseline=minus_baseline, scored_PG=scored)
    values = [1.0, 0.0, 2.0, 0.5, 0.0]
    if minus_baseline:
        values = [0.5, -0.5, *(value - 2.5 / 3 for value in (2.0, 0.5, 0.0))]
    mean, spread = statistics.fmean(values), statistics.pstdev(values)
    assert found[:, 0].tolist() == pytest.approx([
        *((value - mean) / spread for value in values[:2]), 0.0, *((value - mean) / spread for value in values[2:]),
    ])  # fmt: skip


def test_a_part_that_does_not_apply_leaves_its_rollout_out_of_that_parts_baseline():
    nan = math.nan
    parts = {"form": torch.tensor([[1.0, 0.0, nan, nan]]), "right": torch.tensor([[1.0, 0.0, 0.5, nan]])}
    scored = torch.tensor([[True, True, True, False]])
    found = decoupled_advantages(parts, None, leave_one_out=False, normalize=False, scored_PG=scored)
    sums = [0.5 + 0.5, -0.5 - 0.5, 0.0]
    assert found.tolist()[0] == pytest.approx([*(value / statistics.stdev(sums) for value in sums), 0.0])


GROUPS = st.integers(2, 7).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=size, max_size=size), min_size=1, max_size=4
    )
)


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_every_group_of_any_size_has_the_advantages_computed_in_plain_numbers(leave_one_out, normalize):
    @hypothesis_settings(max_examples=100)
    @given(groups=GROUPS)
    def check(groups):
        found = group_advantages(torch.tensor(groups), leave_one_out=leave_one_out, normalize=normalize)
        for row, rewards in zip(found.tolist(), groups, strict=True):
            assert row == pytest.approx(advantages_by_hand(rewards, leave_one_out, normalize), rel=1e-4, abs=1e-5)

    check()


@hypothesis_settings(max_examples=100)
@given(
    rewards=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=6),
    leave_one_out=st.booleans(),
    normalize=st.booleans(),
)
def test_finite_rewards_give_finite_advantages(rewards, leave_one_out, normalize):
    found = group_advantages(torch.tensor([rewards]), leave_one_out=leave_one_out, normalize=normalize)
    assert torch.isfinite(found).all()
    if normalize and not leave_one_out:
        assert found.abs().max() <= len(rewards) ** 0.5
