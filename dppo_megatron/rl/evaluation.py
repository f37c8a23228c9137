"""Validation: sampled completions of held-out prompts, scored and summed over ranks."""

from dataclasses import astuple, dataclass

import numpy as np

from dppo_megatron.batches import FinishReason, FloatArray, RolloutBatch


@dataclass(frozen=True, slots=True)
class EvaluationSums:
    """What one rank's share adds to an evaluation; the sum over ranks is that of the whole.

    reward: over samples. best_reward: over prompts, the best of the prompt's samples.
    completion_tokens: stop tokens included. num_stopped: samples that ended on a stop token.
    """

    num_prompts: float
    num_samples: float
    reward: float
    best_reward: float
    completion_tokens: float
    num_stopped: float

    def to_array(self) -> FloatArray:
        """The sums as float64 [6], to be added over ranks."""
        return np.array(astuple(self), np.float64)

    @classmethod
    def of(cls, rollouts: RolloutBatch, rewards: FloatArray, *, num_generations: int) -> "EvaluationSums":
        """Of the samples of some prompts, possibly none; rewards: [N] of N completions."""
        assert rewards.shape == (len(rollouts.completions),)
        return cls(
            num_prompts=len(rollouts.prompts),
            num_samples=len(rewards),
            reward=float(rewards.sum()),
            best_reward=float(rewards.reshape(-1, num_generations).max(axis=1).sum()),
            completion_tokens=len(rollouts.completions.values),
            num_stopped=float((rollouts.finish_reasons == FinishReason.STOP).sum()),
        )

    @classmethod
    def from_array(cls, sums: FloatArray) -> "EvaluationSums":
        """The inverse of ``to_array``."""
        return cls(*sums.tolist())


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How good the policy is on held-out prompts.

    accuracy: mean reward. pass_at_k: mean over prompts of the best reward among all their k samples, which
    is pass@k for rewards of 0 or 1. mean_length: tokens. stop_fraction: samples that ended on a stop token.
    """

    accuracy: float
    pass_at_k: float
    mean_length: float
    stop_fraction: float

    @classmethod
    def from_sums(cls, sums: EvaluationSums) -> "Evaluation":
        """Divide the sums over all ranks."""
        assert sums.num_samples > 0, "an evaluation without prompts"
        return cls(
            accuracy=sums.reward / sums.num_samples,
            pass_at_k=sums.best_reward / sums.num_prompts,
            mean_length=sums.completion_tokens / sums.num_samples,
            stop_fraction=sums.num_stopped / sums.num_samples,
        )
