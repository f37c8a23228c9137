"""What is done to rewards before advantages are taken: scaling, and penalties for overlong completions."""

import numpy as np

from dppo_megatron.batches import FinishReason, FloatArray, IntArray
from dppo_megatron.config.schema import GrpoConfig


def shape_rewards(
    rewards: FloatArray, *, completion_lengths: IntArray, finish_reasons: IntArray, grpo: GrpoConfig
) -> FloatArray:
    """Scaled, then shaped rewards, float64 [N]; validation keeps the raw ones.

    Scaling clips to the source's range and maps it to the target's. Shaping adds to a completion longer than
    ``max_response_length - overlong_buffer_length`` a penalty that grows by ``overlong_buffer_penalty`` over each
    buffer's length; with ``stop_properly_penalty_coef`` it multiplies the rewards of truncated completions instead.

    Source: Yu et al., "DAPO" (arXiv 2503.14476), eq. 13; as in NeMo-RL the penalty goes on growing past the limit.
    """
    scaling, shaping = grpo.reward_scaling, grpo.reward_shaping
    if scaling.enabled:
        fraction = (np.clip(rewards, scaling.source_min, scaling.source_max) - scaling.source_min) / (
            scaling.source_max - scaling.source_min
        )
        rewards = scaling.target_min + fraction * (scaling.target_max - scaling.target_min)
    if not shaping.enabled:
        return rewards
    if shaping.stop_properly_penalty_coef is not None:
        truncated = finish_reasons == FinishReason.LENGTH
        return np.where(truncated, rewards * shaping.stop_properly_penalty_coef, rewards)
    buffer, penalty, limit = (
        shaping.overlong_buffer_length,
        shaping.overlong_buffer_penalty,
        shaping.max_response_length,
    )
    assert buffer is not None
    assert penalty is not None
    assert limit is not None
    excess = np.maximum(completion_lengths - (limit - buffer), 0)
    return rewards - excess / buffer * penalty
