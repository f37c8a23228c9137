import itertools
import math

import numpy as np
import pytest

from dppo_megatron.rl.pass_at_k import estimate, majority_at_k, pass_at_k


@pytest.mark.parametrize("num_samples", [1, 3, 6])
def test_pass_at_k_is_the_fraction_of_subsets_that_hold_a_right_sample(num_samples: int) -> None:
    for k in range(1, num_samples + 1):
        for right in range(num_samples + 1):
            samples = [1] * right + [0] * (num_samples - right)
            subsets = list(itertools.combinations(samples, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            found = pass_at_k(np.array([right]), num_samples=num_samples, k=k)
            assert found[0] == pytest.approx(expected, abs=1e-12)


def test_the_majority_votes_among_the_first_k_ties_go_to_the_first_and_silence_is_wrong() -> None:
    answers = [["4", "5", "5", "4"], ["a", None, None, "b"], [None, None, None, "4"], ["5", "4", "4", "4"]]
    right = np.array([[1, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 1, 1, 1]], float)
    assert majority_at_k(answers, right=right, k=3).tolist() == [0, 0, 0, 1]
    assert majority_at_k(answers, right=right, k=4).tolist() == [1, 0, 1, 1]


def test_the_interval_of_single_samples_is_wilson_s() -> None:
    values = np.array([1.0] * 7 + [0.0] * 3)
    found = estimate(values, num_samples=1)
    # Wilson's limits solve |p_hat - p| = z * sqrt(p (1 - p) / n).
    for limit in (found.low, found.high):
        assert abs(0.7 - limit) == pytest.approx(1.959964 * math.sqrt(limit * (1 - limit) / 10), rel=1e-5)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    stream = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        skill = stream.beta(0.5, 0.5, size=60)  # prompts differ much: samples of one are no independent trials
        found = estimate(stream.binomial(8, skill) / 8, num_samples=8)
        covered += found.low <= 0.5 <= found.high
    assert 0.93 < covered / 2000 < 0.97


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_or_all_wrong_is_no_certainty(value: float) -> None:
    found = estimate(np.full(30, value), num_samples=8)
    assert found.value == value
    assert 0.05 < found.high - found.low < 0.2
