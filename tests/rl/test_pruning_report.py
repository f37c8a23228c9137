"""What a step's pruning reports."""

import numpy as np
import pytest

from dppo_megatron.batches import PromptBatch, PrunedBatch, Ragged, ScoredBatch
from dppo_megatron.rl.pruning_report import PruningReport, VarianceFactors


def test_variance_factors_reproduce_theorem_4_1() -> None:
    for rate, per_kept, per_candidate in ((0.7, 1.41, 2.17), (0.9, 3.03, 5.50)):
        factors = VarianceFactors.of(np.array([1 - rate, 1.0, 0.0]))
        assert factors.per_kept == pytest.approx(per_kept, abs=0.0051)
        assert factors.per_candidate == pytest.approx(per_candidate, abs=0.0051)


def test_a_report_counts_prompts_completions_weights_and_tokens_over_all_minibatches() -> None:
    prompts = PromptBatch(
        prompt_ids=np.array([1, 2]),
        occurrences=np.zeros(2, np.int64),
        minibatches=np.array([0, 1]),
        tokens=Ragged.from_rows([[1], [1]]),
        texts=("", ""),
        answers=("", ""),
        weights=np.array([1.0, 2.0]),
        num_candidates=np.array([1, 2]),
    )
    scores = ScoredBatch(
        prompts=prompts,
        num_generations=2,
        rewards=np.zeros(4),
        advantages=np.array([0.0, 1.0, 1.0, 1.0]),
        completion_lengths=np.array([10, 20, 30, 40]),
        finish_reasons=np.zeros(4, np.int64),
        surprises=np.ones(4),
    )
    plans = tuple(
        PrunedBatch(
            minibatch=m,
            sequences=np.array(sequences),
            weights=np.array(weights),
            lengths=np.array(lengths) + 1,
            completion_lengths=np.array(lengths),
            advantages=np.ones(len(sequences)),
            denominator=4.0,
            candidates=np.array([2 * m, 2 * m + 1]),
            keep_probabilities=np.array(probabilities),
        )
        for m, sequences, weights, lengths, probabilities in (
            (0, [1], [1.0], [20], [0.0, 1.0]),
            (1, [3], [4.0], [40], [0.25, 0.5]),
        )
    )
    report = PruningReport.of(scores, plans=plans)
    assert (report.num_candidate_prompts, report.num_kept_prompts) == (3, 2)
    assert (report.num_completions, report.num_droppable_completions) == (4, 1)
    assert report.num_kept_completions == 2
    assert (report.weight_mean, report.weight_max) == (2.5, 4.0)
    assert report.effective_sample_size == pytest.approx(25 / 17)
    assert report.prompt_variance.per_candidate == pytest.approx((1 + 4) / 3)
    assert report.prompt_variance.per_kept == pytest.approx((1 + 4) / 3 * 2 / 3)
    assert report.completion_variance.per_candidate == pytest.approx((1 + 4 + 2) / 3)
    assert report.completion_variance.per_kept == pytest.approx((1 + 4 + 2) / 3 * 1.75 / 3)
    assert report.num_tokens_not_generated == 70
    assert (report.num_tokens_generated, report.num_tokens_trained) == (100, 60)
