import torch

from nemo_offload_rl.algorithms.rewards import overlong_sample_mask, scale_rewards, shape_rewards
from nemo_offload_rl.algorithms.settings import RewardScalingSettings, RewardShapingSettings


def scaling(enabled: bool = True) -> RewardScalingSettings:
    return RewardScalingSettings(enabled=enabled, source_min=0.0, source_max=2.0, target_min=-1.0, target_max=1.0)


def shaping(enabled: bool = True) -> RewardShapingSettings:
    return RewardShapingSettings(
        enabled=enabled, overlong_buffer_length=4, overlong_buffer_penalty=0.5, max_response_length=10
    )


def test_scaling_maps_the_source_range_linearly_and_clips_outside_it():
    scaled = scale_rewards(torch.tensor([-3.0, 0.0, 0.5, 1.0, 2.0, 9.0]), scaling())
    assert scaled.tolist() == [-1.0, -1.0, -0.5, 0.0, 1.0, 1.0]


def test_the_length_penalty_starts_inside_the_buffer_and_ends_at_its_full_value():
    shaped = shape_rewards(torch.ones(5), torch.tensor([1, 6, 8, 10, 12]), shaping())
    assert shaped.tolist() == [1.0, 1.0, 0.75, 0.5, 0.5]


def test_switched_off_scaling_and_shaping_change_nothing():
    rewards = torch.tensor([-3.0, 9.0])
    assert torch.equal(scale_rewards(rewards, scaling(enabled=False)), rewards)
    assert torch.equal(shape_rewards(rewards, torch.tensor([99, 99]), shaping(enabled=False)), rewards)


def test_overlong_filtering_masks_truncated_samples_only():
    truncated = torch.tensor([True, False, True])
    assert overlong_sample_mask(truncated, filtering=True).tolist() == [0.0, 1.0, 0.0]
    assert overlong_sample_mask(truncated, filtering=False).tolist() == [1.0, 1.0, 1.0]
