"""Rotary frequencies of an architecture: plain, slowed linearly, or slowed as Llama 3.1 does."""

import math

import torch
from torch import Tensor

from dppo_megatron.architecture import Architecture


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """Angle per position of each pair of a head's channels, float32 [head_dim / 2].

    Source: Llama 3.1's reference code; transformers ``modeling_rope_utils``.
    """
    size = architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # in the context of pre-training
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * slowed + share * frequencies
