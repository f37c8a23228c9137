"""Where a step's candidates come from: a fixed number of prompts, or as many as keep the expected number."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dppo_megatron.batches import PromptBatch
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.prompts import Prompts
from dppo_megatron.rl.pruning import Pruning, prompt_keep_probabilities


class CandidateSource(Protocol):
    """What gives each step its candidates."""

    def next_batch(self, draws: Draws) -> PromptBatch:
        """The next candidates, assigned to mini-batches, all weights 1."""
        ...


@dataclass(frozen=True, slots=True)
class FixedNumber:
    """Always the same number of candidates."""

    prompts: Prompts

    def next_batch(self, draws: Draws) -> PromptBatch:
        """The next candidates of the stream."""
        return self.prompts.next_batch()


@dataclass(frozen=True, slots=True)
class Refill:
    """Candidates until the expected number kept, the sum of their keep probabilities, is the configured one.

    The number of candidates then depends on the past alone, so that the estimator stays exact; going on until the
    realised number were reached would bias it.
    """

    prompts: Prompts
    history: PromptHistory
    pruning: Pruning

    def next_batch(self, draws: Draws) -> PromptBatch:
        """The next candidates of the stream, as many as it takes."""
        target = self.prompts.num_prompts_per_step
        count = target
        while True:
            candidates = self.prompts.peek(count)
            # Probabilities can depend on who else is a candidate: they are those of the whole set.
            expected = float(
                prompt_keep_probabilities(candidates, history=self.history, pruning=self.pruning, draws=draws).sum()
            )
            missing = math.ceil(np.round(target - expected, 6))
            if missing <= 0:
                return self.prompts.next_batch(count)
            count += missing
