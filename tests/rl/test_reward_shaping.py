"""Rewards before advantages: scaling and the penalties of long completions."""

from dataclasses import replace

import numpy as np

from dppo_megatron.batches import FinishReason, FloatArray
from dppo_megatron.config.schema import GrpoConfig, RewardScalingConfig, RewardShapingConfig
from dppo_megatron.rl.reward_shaping import shape_rewards

SHAPING = RewardShapingConfig(
    enabled=True, overlong_buffer_length=10, overlong_buffer_penalty=0.5, max_response_length=100
)
LENGTHS = np.array([1, 90, 91, 100, 110])
REASONS = np.array([FinishReason.STOP] * 3 + [FinishReason.LENGTH] * 2, np.int64)


def shaped(rewards: list[float], grpo: GrpoConfig) -> FloatArray:
    return shape_rewards(np.array(rewards), completion_lengths=LENGTHS, finish_reasons=REASONS, grpo=grpo)


def test_rewards_pass_unchanged_where_nothing_is_asked_for() -> None:
    np.testing.assert_array_equal(shaped([0, 1, 2, -3, 0.5], GrpoConfig()), [0, 1, 2, -3, 0.5])


def test_scaling_clips_to_the_source_and_maps_to_the_target() -> None:
    scaling = RewardScalingConfig(enabled=True, source_min=0, source_max=2, target_min=-1, target_max=1)
    np.testing.assert_array_equal(shaped([-5, 0, 1, 2, 9], GrpoConfig(reward_scaling=scaling)), [-1, -1, 0, 1, 1])


def test_the_overlong_penalty_grows_from_the_start_of_the_buffer() -> None:
    np.testing.assert_allclose(
        shaped([1, 1, 1, 1, 1], GrpoConfig(reward_shaping=SHAPING)), [1, 1, 0.95, 0.5, 0], atol=1e-15
    )


def test_the_truncation_factor_replaces_the_overlong_penalty() -> None:
    grpo = GrpoConfig(reward_shaping=replace(SHAPING, stop_properly_penalty_coef=0.25))
    np.testing.assert_array_equal(shaped([1, 1, 1, 1, 2], grpo), [1, 1, 1, 0.25, 0.5])


def test_shaping_acts_on_scaled_rewards() -> None:
    scaling = RewardScalingConfig(enabled=True, target_min=-1)
    grpo = GrpoConfig(reward_scaling=scaling, reward_shaping=SHAPING)
    np.testing.assert_allclose(shaped([0, 1, 1, 1, 0], grpo), [-1, 1, 0.95, 0.5, -2])
