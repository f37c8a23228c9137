"""Weights of the trainer over the sampler: what corrects a loss for rollouts that another engine sampled."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dppo_megatron.config.schema import LossConfig


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Weights of the surrogate's tokens, float [T], and which of them the bounds do not allow, bool [T]."""

    weights: Tensor
    out_of_bounds: Tensor


def importance_weights(
    drift: Tensor, *, config: LossConfig, total: Tensor | None, mean: Tensor | None
) -> ImportanceWeights:
    """exp(old logp - sampler logp) a token, bounded as the configuration asks; constants for the gradient.

    drift: old logp - sampler logp, [T], zero where nothing is trained. total, mean: its sum and its mean over each
    token's sequence, [T], for ``sequence_level_importance_ratios`` and for ``seq-mask-tis``. Weights that are not
    finite become zero.

    Source: truncation (tis): Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training";
    icepop: Ling team, "Every Step Evolves"; seq-mask-tis: Liu et al., "When Speed Kills Stability".
    """
    if config.sequence_level_importance_ratios:
        assert total is not None
        weights = _finite(total.exp())
    else:
        weights = _finite(drift.exp())
    if config.truncated_importance_sampling_type is None:
        return ImportanceWeights(weights, torch.zeros_like(weights, dtype=torch.bool))
    assert config.truncated_importance_sampling_ratio is not None
    high, low = config.truncated_importance_sampling_ratio, config.truncated_importance_sampling_ratio_min or 0.0
    judged = weights
    if config.truncated_importance_sampling_type == "seq-mask-tis":
        assert mean is not None
        judged = _finite(mean.exp())
    outside = (judged < low) | (judged > high)
    bounded = weights.clamp(low, high) if config.truncated_importance_sampling_type == "tis" else 0.0
    return ImportanceWeights(torch.where(outside, bounded, weights), outside)


def _finite(weights: Tensor) -> Tensor:
    return weights.nan_to_num(nan=0.0, posinf=0.0)
