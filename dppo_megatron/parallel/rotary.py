"""Rotary frequencies of an architecture."""

import torch
from torch import Tensor

from dppo_megatron.architecture import Architecture


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """Angle per position of each pair of a head's channels, float32 [head_dim / 2]."""
    size = architecture.head_dim
    return 1.0 / architecture.rope_theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
