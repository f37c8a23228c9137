"""The study of pruning scores: its designs spend what they say, and the oracle is what the others are measured by."""

import numpy as np
import pytest

from dppo_megatron.batches import FloatArray
from tools.benchmarks.gradient_norms import Completions
from tools.benchmarks.pruning_scores import BASE, SCORES, Line, added_variance, at_equal_tokens, lines_of, table


def completions(count: int = 200) -> Completions:
    """Gradients that follow the advantages and the square roots of lengths, with noise of their own."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 50, count).astype(np.float64)
    rests = np.sqrt(lengths) * rng.uniform(0.1, 1, count)
    return Completions(
        sizes=rng.choice([0.4, 1.0, 2.6], count),
        lengths=lengths,
        costs=lengths + 20,
        norms=30 * rests * rng.uniform(0.8, 1.2, count),
        rest_sums=rests * 1.5,
        rest_roots=rests,
        surprisals=rests * 2,
        output_norms=rests * 1.1,
        output_layer_norms=rests * 7,
    )


@pytest.mark.parametrize("kept", [0.3, 0.7])
def test_at_equal_tokens_the_expected_tokens_are_the_asked_fraction(kept: float) -> None:
    batch = completions()
    probabilities = at_equal_tokens(batch.sizes / batch.lengths, batch.costs, kept=kept)
    assert probabilities @ batch.costs == pytest.approx(kept * batch.costs.sum(), rel=1e-6)


def test_the_added_variance_is_zero_where_everything_is_kept_and_one_where_half_is() -> None:
    batch = completions()

    def variance(p: FloatArray) -> float:
        return added_variance(batch, divisors=batch.lengths, probabilities=p)

    assert variance(np.ones(len(batch))) == 0
    assert variance(np.full(len(batch), 0.5)) == pytest.approx(1)


@pytest.mark.parametrize("mean", ["sequence", "token"])
def test_no_score_has_less_variance_than_the_gradients_norms(mean: str) -> None:
    lines = {line.score: line for line in lines_of("made up", [completions()], fractions=[0.5]) if line.mean == mean}
    oracle = lines["A norm(gradient) / D: oracle"].at_equal_completions
    aware = lines["A norm(gradient) / D / sqrt cost: oracle"].at_equal_tokens
    assert all(oracle <= line.at_equal_completions for line in lines.values())
    # Best but for what the least keep probability adds.
    assert all(aware <= 1.01 * line.at_equal_tokens for line in lines.values())
    assert lines["A norm(1-p) / D"].at_equal_completions < 0.8 * lines[BASE].at_equal_completions


def test_the_table_gives_ratios_to_the_first_score() -> None:
    lines = [Line("one", "token", 0.5, name, 0.25 if name == BASE else 0.5, 1.0) for name in SCORES]
    rows = table(lines, mean="token", kept=0.5, equal="completions").splitlines()
    assert rows[3] == f"| added variance of {BASE} | 0.250 |"
    assert {row.split(" | ")[1] for row in rows[4:]} == {"2.00 |"}
