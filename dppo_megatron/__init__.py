"""GRPO post-training on megatron-core with unbiased dynamic pruning and dense packing."""

__version__ = "0.1.0"
