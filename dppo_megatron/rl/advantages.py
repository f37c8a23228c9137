"""Advantages of whole groups."""

import math

import numpy as np

from dppo_megatron.batches import FloatArray
from dppo_megatron.config.schema import GrpoConfig

_EPSILON = 1e-6


def group_advantages(rewards: FloatArray, *, grpo: GrpoConfig) -> FloatArray:
    """Rewards minus a baseline, over one standard deviation a group: float64 [P, G] from rewards [P, G].

    The baseline is the group's mean, or for each completion the mean of the others (leave-one-out). A group
    whose rewards are all equal gets exact zeros, so that its terms may be dropped with certainty.

    Departure from NeMo-RL: the standard deviation is the sample standard deviation of the whole group, theirs
    leaves each row out as well and gives the only right answer in sixteen an advantage of 1.0
    (test_the_only_right_answer_in_sixteen_gets_3_75_or_4).

    Raises: ValueError for groups of fewer than two, rewards that are not finite, clip bounds on one side of 0.
    Source: Shao et al., arXiv 2402.03300, section 4.1.2; the leave-one-out baseline: Ahmadian et al.,
    arXiv 2402.14740.
    """
    low = -math.inf if grpo.advantage_clip_low is None else grpo.advantage_clip_low
    high = math.inf if grpo.advantage_clip_high is None else grpo.advantage_clip_high
    if not low <= 0 <= high:
        raise ValueError(
            f"grpo.advantage_clip_low, advantage_clip_high: {low}, {high}; allowed: low <= 0 <= high, "
            "so that a zero advantage stays zero"
        )
    rewards = np.ascontiguousarray(rewards, np.float64)
    num_generations = rewards.shape[1]
    if num_generations < 2:
        raise ValueError(
            f"grpo.num_generations_per_prompt: {num_generations}; allowed: at least 2, "
            "since a completion alone in its group has nothing to be compared with"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards: {rewards[~np.isfinite(rewards)][0]}; allowed: finite numbers")
    deviations = rewards - rewards.mean(axis=1, keepdims=True)
    # The mean of equal floats can be off by a rounding, and a deviation of 1e-17 is not a zero.
    deviations[rewards.min(axis=1) == rewards.max(axis=1)] = 0.0
    advantages = deviations
    if grpo.use_leave_one_out_baseline:
        advantages = deviations * (num_generations / (num_generations - 1))
    if grpo.normalize_rewards:
        variances = (deviations**2).sum(axis=1, keepdims=True) / (num_generations - 1)
        advantages = advantages / (np.sqrt(variances) + _EPSILON)
    return np.clip(advantages, low, high)
