from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nemo_offload_rl.algorithms.advantages import overlong_sample_mask, scale_rewards, shape_rewards
from nemo_offload_rl.keys.grpo import RewardScalingConfig, RewardShapingConfig


def scaling(enabled: bool = True) -> RewardScalingConfig:
    return RewardScalingConfig(enabled=enabled, source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0)


def shaping(enabled: bool = True) -> RewardShapingConfig:
    return RewardShapingConfig(
        enabled=enabled, overlong_buffer_length=4, overlong_buffer_penalty=0.5, max_response_length=10
    )


def test_scaling_maps_the_source_range_linearly_and_clips_outside_it():
    scaled = scale_rewards(torch.tensor([-3.0, 0.0, 0.5, 1.0, 2.0, 9.0]), scaling())
    assert scaled.tolist() == [-1.0, -1.0, -0.5, 0.0, 1.0, 1.0]


def test_the_length_penalty_starts_inside_the_buffer_and_goes_on_growing_beyond_the_limit():
    shaped = shape_rewards(torch.ones(5), torch.tensor([1, 6, 8, 10, 12]), torch.ones(5) == 1, shaping())
    assert shaped.tolist() == [1.0, 1.0, 0.75, 0.5, 0.25]


def test_switched_off_scaling_and_shaping_change_nothing():
    rewards = torch.tensor([-3.0, 9.0])
    assert torch.equal(scale_rewards(rewards, scaling(enabled=False)), rewards)
    assert torch.equal(shape_rewards(rewards, torch.tensor([99, 99]), rewards > 0, shaping(enabled=False)), rewards)


def test_overlong_filtering_masks_truncated_samples_only():
    truncated = torch.tensor([True, False, True])
    assert overlong_sample_mask(truncated, filtering=True).tolist() == [0.0, 1.0, 0.0]
    assert overlong_sample_mask(truncated, filtering=False).tolist() == [1.0, 1.0, 1.0]


REWARDS = st.floats(-1e6, 1e6, width=32)


@hypothesis_settings(max_examples=100)
@given(reward=REWARDS, other=REWARDS, low=st.integers(-5, 5), width=st.integers(1, 5), to=st.integers(-5, 5))
def test_scaling_is_the_line_through_both_ends_and_keeps_order_and_range(reward, other, low, width, to):
    settings = RewardScalingConfig(
        enabled=True, source_min=low, source_max=low + width, target_min=to, target_max=to + 3
    )
    first, second = scale_rewards(torch.tensor([reward, other]), settings).tolist()
    clipped = min(max(reward, low), low + width)
    assert abs(first - (to + 3 * (clipped - low) / width)) < 1e-5
    assert (first - second) * (reward - other) >= 0


@hypothesis_settings(max_examples=100)
@given(length=st.integers(0, 50), buffer=st.integers(1, 20), limit=st.integers(21, 40), penalty=st.integers(0, 4))
def test_the_length_penalty_is_nemo_rls_formula_below_and_beyond_the_limit(length, buffer, limit, penalty):
    settings = RewardShapingConfig(
        enabled=True, overlong_buffer_length=buffer, overlong_buffer_penalty=penalty, max_response_length=limit
    )
    # apply_reward_shaping: min(-exceed_length / overlong_buffer_length * overlong_buffer_penalty, 0)
    expected = min(-(length - (limit - buffer)) / buffer * penalty, 0)
    (shaped,) = shape_rewards(torch.tensor([2.0]), torch.tensor([length]), torch.tensor([True]), settings).tolist()
    assert abs(shaped - (2.0 + expected)) < 1e-4


@pytest.mark.parametrize("coefficient", [0.0, 0.3, 1.0])
def test_the_reward_of_a_cut_response_is_scaled_in_place_of_the_length_penalty_as_in_prorl_v2(coefficient):
    settings = replace(shaping(), stop_properly_penalty_coef=coefficient)
    rewards, truncated = torch.tensor([1.0, 1.0, -2.0]), torch.tensor([True, False, True])
    # apply_reward_shaping: torch.where(truncated, rewards * stop_properly_penalty_coef, rewards), and no more; but a
    # penalty never makes a cut response better than one that ended.
    expected = [coefficient, 1.0, -2.0]
    shaped = shape_rewards(rewards, torch.tensor([99, 99, 99]), truncated, settings)
    torch.testing.assert_close(shaped, torch.tensor(expected))
    off = replace(settings, enabled=False)
    assert torch.equal(shape_rewards(rewards, torch.tensor([99, 99, 99]), truncated, off), rewards)
