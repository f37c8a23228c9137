"""What pruning did in one step, for the log."""

from dataclasses import dataclass

import numpy as np

from dppo_megatron.batches import FloatArray, PrunedBatch, ScoredBatch


@dataclass(frozen=True, slots=True)
class VarianceFactors:
    """How much pruning multiplies the variance when all terms are alike.

    per_candidate: the mean of 1 / p. per_kept: that times the expected fraction kept.
    Source: Zhu et al., arXiv 2603.04135, Theorem 4.1, whose factor is per_kept.
    """

    per_candidate: float
    per_kept: float

    @classmethod
    def of(cls, probabilities: FloatArray) -> "VarianceFactors":
        """The factors of keep probabilities [N], those of 0 (identically zero terms) left out."""
        positive = probabilities[probabilities > 0]
        if not len(positive):
            return cls(1.0, 1.0)
        per_candidate = float((1 / positive).mean())
        return cls(per_candidate, float(positive.mean()) * per_candidate)


@dataclass(frozen=True, slots=True)
class PruningReport:
    """Counts, weights and variance of one step, over all its mini-batches.

    num_completions: those generated; num_droppable_completions: of these, dropped with certainty (p = 0).
    weight_mean, weight_max, effective_sample_size ((sum w)**2 / sum w**2): of the kept completions.
    prompt_variance: from the kept prompts, each standing for 1 / p of the candidates.
    tokens: completion tokens. tokens_not_generated: an estimate, sum of (1 / p - 1) * tokens of kept prompts.
    """

    num_candidate_prompts: int
    num_kept_prompts: int
    num_completions: int
    num_droppable_completions: int
    num_kept_completions: int
    weight_mean: float
    weight_max: float
    effective_sample_size: float
    prompt_variance: VarianceFactors
    completion_variance: VarianceFactors
    num_tokens_not_generated: float
    num_tokens_generated: int
    num_tokens_trained: int

    @classmethod
    def of(cls, scores: ScoredBatch, *, plans: tuple[PrunedBatch, ...]) -> "PruningReport":
        """The report of a step's scores and of what ``prune_completions`` made of them."""
        prompts = scores.prompts
        num_candidates = int(prompts.num_candidates.sum())
        weights = np.concatenate([plan.weights for plan in plans])
        probabilities = np.concatenate([plan.keep_probabilities for plan in plans])
        per_candidate = float((prompts.weights**2).sum()) / max(num_candidates, 1)
        lengths = scores.completion_lengths
        return cls(
            num_candidate_prompts=num_candidates,
            num_kept_prompts=len(prompts),
            num_completions=len(scores),
            num_droppable_completions=int((probabilities == 0).sum()),
            num_kept_completions=len(weights),
            weight_mean=float(weights.mean()) if len(weights) else 0.0,
            weight_max=float(weights.max(initial=0.0)),
            effective_sample_size=float(weights.sum() ** 2 / max((weights**2).sum(), 1.0)),
            prompt_variance=VarianceFactors(per_candidate, per_candidate * len(prompts) / max(num_candidates, 1)),
            completion_variance=VarianceFactors.of(probabilities),
            num_tokens_not_generated=float(lengths @ (prompts.weights[scores.prompt_rows] - 1)),
            num_tokens_generated=int(lengths.sum()),
            num_tokens_trained=int(sum(plan.completion_lengths.sum() for plan in plans)),
        )
