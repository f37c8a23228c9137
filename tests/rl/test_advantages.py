"""Advantages of whole groups."""

import numpy as np
import pytest

from dppo_megatron.config.schema import GrpoConfig
from dppo_megatron.rl.advantages import group_advantages

REWARDS = np.random.default_rng(0).random((5, 6)) * 3 - 1


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_each_advantage_matches_the_formula_written_out(leave_one_out: bool, normalize: bool) -> None:
    grpo = GrpoConfig(normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out)
    actual = group_advantages(REWARDS, grpo=grpo)
    for p, group in enumerate(REWARDS):
        for g, reward in enumerate(group):
            others = [x for i, x in enumerate(group) if i != g]
            baseline = sum(others) / 5 if leave_one_out else sum(group) / 6
            mean = sum(group) / 6
            deviation = (sum((x - mean) ** 2 for x in group) / 5) ** 0.5 + 1e-6 if normalize else 1.0
            assert actual[p, g] == pytest.approx((reward - baseline) / deviation, rel=1e-12)


@pytest.mark.parametrize(("leave_one_out", "expected"), [(False, 3.75), (True, 4.0)])
def test_the_only_right_answer_in_sixteen_gets_3_75_or_4(leave_one_out: bool, expected: float) -> None:
    grpo = GrpoConfig(use_leave_one_out_baseline=leave_one_out)
    assert group_advantages(np.eye(1, 16), grpo=grpo)[0, 0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_give_exact_zeros(leave_one_out: bool) -> None:
    rewards = np.full((1, 3), 0.1)
    assert (rewards - rewards.mean()).any(), "the example must have a mean that is off by a rounding"
    grpo = GrpoConfig(use_leave_one_out_baseline=leave_one_out)
    assert not group_advantages(rewards, grpo=grpo).any()


def test_a_group_is_scored_alike_in_every_batch() -> None:
    whole = group_advantages(REWARDS, grpo=GrpoConfig())
    alone = [group_advantages(REWARDS[p : p + 1], grpo=GrpoConfig()) for p in range(len(REWARDS))]
    np.testing.assert_array_equal(whole, np.concatenate(alone))
    np.testing.assert_array_equal(whole, group_advantages(np.asfortranarray(REWARDS), grpo=GrpoConfig()))


def test_advantages_are_clipped_to_the_configured_range() -> None:
    plain = group_advantages(REWARDS, grpo=GrpoConfig())
    clipped = group_advantages(REWARDS, grpo=GrpoConfig(advantage_clip_low=-0.5, advantage_clip_high=0.25))
    np.testing.assert_array_equal(clipped, np.maximum(np.minimum(plain, 0.25), -0.5))


@pytest.mark.parametrize(("low", "high"), [(0.1, 1.0), (-1.0, -0.1), (1.0, -1.0)])
def test_a_clip_range_without_zero_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="advantage_clip_low"):
        group_advantages(REWARDS, grpo=GrpoConfig(advantage_clip_low=low, advantage_clip_high=high))


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_group_of_one_is_refused(leave_one_out: bool) -> None:
    with pytest.raises(ValueError, match=r"num_generations_per_prompt: 1; .*2"):
        group_advantages(np.ones((3, 1)), grpo=GrpoConfig(use_leave_one_out_baseline=leave_one_out))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=f"rewards: {bad}"):
        group_advantages(np.array([[0.0, bad]]), grpo=GrpoConfig())
