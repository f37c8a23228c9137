"""GRESO's choice of prompts: those that lately gave groups of equal rewards are skipped, without reweighting. Biased.

Source: Zheng et al., "Act Only When It Pays" (arXiv 2506.02177), section 4.
"""

from dataclasses import dataclass

import numpy as np

from dppo_megatron.batches import FloatArray, IntArray
from dppo_megatron.config.schema import GresoConfig


@dataclass(frozen=True, slots=True)
class Exploration:
    """Keep probability after one group of equal rewards: of all right ones (easy), of all wrong ones (hard)."""

    easy: float
    hard: float

    def keep_probabilities(self, zero_runs: IntArray, *, config: GresoConfig) -> FloatArray:
        """max(p^z, min_exploration) after z groups of equal rewards in a row, 1 where z is 0; float64 [P].

        zero_runs: int64 [P], z of easy prompts, -z of hard ones.
        """
        base = np.where(zero_runs > 0, self.easy, self.hard)
        probabilities = np.maximum(base ** np.abs(zero_runs), config.min_exploration)
        return np.where(zero_runs == 0, 1.0, probabilities)

    def moved(self, *, num_easy: int, num_hard: int, num_groups: int, config: GresoConfig) -> "Exploration":
        """The controller: one step down where a step had its target share of such groups, else one step up."""

        def move(value: float, count: int, target: float) -> float:
            direction = -1 if count >= target * num_groups else 1
            return min(max(value + direction * config.step, 0.0), 1.0)

        return Exploration(
            move(self.easy, num_easy, config.target_easy), move(self.hard, num_hard, config.target_hard)
        )
