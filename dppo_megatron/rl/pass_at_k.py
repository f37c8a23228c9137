"""How often a policy is right: pass@k, maj@k, with confidence intervals over prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dppo_megatron.batches import FloatArray, IntArray

_Z = 1.959963984540054  # the normal quantile of a 95 % interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """A fraction with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def pass_at_k(num_right: IntArray, *, num_samples: int, k: int) -> FloatArray:
    """Probability that one of k of a prompt's samples, drawn without replacement, is right: float64 [P].

    num_right: int64 [P], right ones among the prompt's ``num_samples``. Unbiased in the policy's pass@k.
    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, equation 1.
    """
    assert 1 <= k <= num_samples
    wrong = (num_samples - num_right).astype(np.float64)
    # C(wrong, k) / C(num_samples, k) as a product of k ratios; a ratio that is not positive makes it zero.
    ratios = [np.maximum(wrong - i, 0.0) / (num_samples - i) for i in range(k)]
    return 1.0 - np.prod(ratios, axis=0)


def majority_at_k(answers: Sequence[Sequence[str | None]], *, right: FloatArray, k: int) -> FloatArray:
    """Whether the commonest answer of a prompt's first k samples is right: float64 [P], 0 or 1.

    answers: [P][n], equal texts vote together, None does not vote. right: float64 [P, n], of each sample.
    A tie goes to the answer given first; without any vote the prompt counts as wrong.
    """
    verdicts = np.zeros(len(answers))
    for prompt, row in enumerate(answers):
        votes: dict[str, list[int]] = {}
        for index, answer in enumerate(row[:k]):
            if answer is not None:
                votes.setdefault(answer, []).append(index)
        if votes:
            winner = max(votes.values(), key=len)
            verdicts[prompt] = right[prompt, winner[0]]
    return verdicts


def estimate(values: FloatArray, *, num_samples: int) -> Estimate:
    """Mean of per-prompt values in 0 .. 1 with Wilson's interval, as if prompts were drawn from a population.

    values: float64 [P]. num_samples: of each prompt. The interval's effective number of trials follows from the
    spread between prompts, at most P * num_samples, and P where all values are 0 or all are 1.
    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    assert len(values), "an estimate without prompts"
    mean, number = float(values.mean()), len(values)
    spread = float(values.var())
    within = mean * (1 - mean)
    trials = float(number)
    if within > 0:
        trials = min(within * number / spread, number * num_samples) if spread > 0 else number * num_samples
    denominator = 1 + _Z**2 / trials
    centre = (mean + _Z**2 / (2 * trials)) / denominator
    half = _Z * math.sqrt(within / trials + _Z**2 / (4 * trials**2)) / denominator
    # At the ends centre and half agree up to rounding.
    return Estimate(mean, max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean)))
