"""How fast a step was: tokens a second, the model's operations a second and their share of the peak."""

from dataclasses import dataclass

import numpy as np

from dppo_megatron import metric_names
from dppo_megatron.architecture import Architecture
from dppo_megatron.batches import IntArray
from dppo_megatron.stage_clock import StageSeconds


def training_flops(architecture: Architecture, lengths: IntArray) -> float:
    """Operations of forward and backward on sequences of the given lengths [K], tokens.

    Multiplications and additions of the matrix products, causal attention counted by half, the backward pass as
    twice the forward one; recomputed activations do not count.
    """
    one, tokens = architecture, lengths.astype(np.float64)
    width = one.num_attention_heads * one.head_dim
    projections = one.hidden_size * (2 * width + 2 * one.num_key_value_heads * one.head_dim)
    layer = projections + 3 * one.hidden_size * one.ffn_hidden_size
    per_token = one.num_layers * layer + one.hidden_size * one.vocab_size
    multiplications = tokens.sum() * per_token + one.num_layers * width * np.square(tokens).sum()
    return float(3 * 2 * multiplications)


@dataclass(frozen=True, slots=True)
class StepPerformance:
    """A step's speed, over all processes.

    rollout: completion tokens sampled a second of sampling. training: prompt and completion tokens a second of
    updating. whole: completion tokens sampled a second of the step, validation and checkpoints left out.
    flops: the model's operations a second of updating. utilisation: of the processes' peak, None where unknown.
    """

    rollout: float
    training: float
    whole: float
    flops: float
    utilisation: float | None

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        *,
        trained_lengths: IntArray,
        rollout_tokens: int,
        seconds: StageSeconds,
        num_processes: int,
        peak_flops: float | None,
    ) -> "StepPerformance":
        """Divide a step's work by its seconds. trained_lengths: tokens of each sequence trained on, prompt included.

        peak_flops: of one process's device.
        """
        flops = _rate(training_flops(architecture, trained_lengths), seconds.update)
        return cls(
            rollout=_rate(rollout_tokens, seconds.rollout),
            training=_rate(float(trained_lengths.sum()), seconds.update),
            whole=_rate(rollout_tokens, seconds.training),
            flops=flops,
            utilisation=flops / (num_processes * peak_flops) if peak_flops else None,
        )

    def metrics(self) -> dict[str, float]:
        """Values by logged name."""
        values = {
            metric_names.ROLLOUT_TOKENS_PER_SECOND: self.rollout,
            metric_names.TRAIN_TOKENS_PER_SECOND: self.training,
            metric_names.TOKENS_PER_SECOND: self.whole,
            metric_names.TRAIN_FLOPS_PER_SECOND: self.flops,
        }
        return values if self.utilisation is None else values | {metric_names.TRAIN_UTILISATION: self.utilisation}


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
