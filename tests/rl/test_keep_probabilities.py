"""Keep probabilities from scores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.batches import FloatArray
from dppo_megatron.config.schema import GrpoConfig
from dppo_megatron.rl.advantages import group_advantages
from dppo_megatron.rl.keep_probabilities import neyman, threshold, top, uniform

ONE_GROUP = np.zeros(4, np.int64)
SCORE_LISTS = st.lists(st.sampled_from([0.0, 1e-6, 0.3, 0.5, 1.0, 3.75, 40.0]), min_size=1, max_size=30)


def bisected_neyman(scores: FloatArray, *, rate: float, least: float) -> FloatArray:
    """The definition, by bisection on c."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * scores, least, 1).mean() < 1 - rate else (low, middle)
    return np.clip(high * scores, least, 1)


def test_threshold_drops_below_the_mean_and_keeps_at_the_mean() -> None:
    scores = np.array([1.0, 2.0, 3.0, 2.0])
    actual = threshold(scores, groups=ONE_GROUP, rate=0.75, min_keep_probability=0.1)
    np.testing.assert_array_equal(actual, [0.25, 1, 1, 1])


def test_threshold_keeps_everything_when_all_scores_tie() -> None:
    for size in range(1, 200):
        groups = np.zeros(size, np.int64)
        scores = np.full(size, 0.9354143466934853)
        assert (threshold(scores, groups=groups, rate=0.5, min_keep_probability=0.1) == 1).all()


def test_threshold_compares_with_the_mean_of_the_own_group() -> None:
    scores = np.array([1.0, 2.0, 10.0, 20.0, 1.0])
    groups = np.array([4, 4, 1, 1, 1])
    actual = threshold(scores, groups=groups, rate=0.5, min_keep_probability=0.1)
    np.testing.assert_array_equal(actual, [0.5, 1, 0.5, 1, 0.5])


@settings(max_examples=200, deadline=None)
@given(SCORE_LISTS, st.sampled_from([0.0, 0.1, 0.5, 0.77, 0.9]))
def test_neyman_spends_its_budget_exactly_within_its_bounds(values: list[float], rate: float) -> None:
    scores = np.array(values)
    actual = neyman(scores, rate=rate, min_keep_probability=0.05)
    assert actual.mean() == pytest.approx(1 - rate, rel=1e-12)
    assert (actual >= 0.05).all()
    assert (actual <= 1).all()


@settings(max_examples=200, deadline=None)
@given(SCORE_LISTS, st.sampled_from([0.1, 0.5, 0.77, 0.9, 0.95]))
def test_neyman_agrees_with_bisection_wherever_positive_scores_can_spend_it(values: list[float], rate: float) -> None:
    scores = np.array(values)
    if np.where(scores > 0, 1, 0.05).mean() <= 1 - rate:
        return
    actual = neyman(scores, rate=rate, min_keep_probability=0.05)
    np.testing.assert_allclose(actual, bisected_neyman(scores, rate=rate, least=0.05), rtol=1e-6)


def test_neyman_gives_a_zero_score_the_least_probability() -> None:
    actual = neyman(np.array([0.0, 1.0, 1.0, 1.0]), rate=0.5, min_keep_probability=0.05)
    np.testing.assert_allclose(actual, [0.05, 0.65, 0.65, 0.65])


def test_neyman_spreads_over_zero_scores_what_positive_ones_cannot_use() -> None:
    actual = neyman(np.array([0.0, 1.0, 0.0, 0.0]), rate=0.5, min_keep_probability=0.05)
    np.testing.assert_allclose(actual, [1 / 3, 1, 1 / 3, 1 / 3])
    np.testing.assert_allclose(neyman(np.zeros(4), rate=0.3, min_keep_probability=0.05), 0.7)


def test_neyman_bounds_weights_by_raising_small_probabilities() -> None:
    scores = np.array([1e-9, 1e-9, 1.0, 1.0])
    actual = neyman(scores, rate=0.6, min_keep_probability=0.2)
    np.testing.assert_allclose(actual, [0.2, 0.2, 0.6, 0.6])


def test_neyman_does_not_depend_on_the_order_of_the_scores() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random(333) * rng.choice([1, 1e-3, 1e3], 333)
    expected = neyman(scores, rate=0.6, min_keep_probability=0.05)
    for _ in range(20):
        order = rng.permutation(333)
        np.testing.assert_array_equal(neyman(scores[order], rate=0.6, min_keep_probability=0.05), expected[order])


def test_uniform_is_one_minus_the_rate_everywhere() -> None:
    np.testing.assert_array_equal(uniform(np.array([0.0, 5.0]), rate=0.25, min_keep_probability=0.1), [0.75, 0.75])


def test_top_keeps_the_highest_scores_and_breaks_ties_by_key() -> None:
    scores = np.array([1.0, 3.0, 2.0, 2.0, 2.0])
    keys = np.array([0, 1, 9, 3, 8], np.uint64)
    np.testing.assert_array_equal(top(scores, rate=0.4, tie_breakers=keys), [0, 1, 0, 1, 1])
    np.testing.assert_array_equal(top(scores, rate=0.8, tie_breakers=keys), [0, 1, 0, 0, 0])
    # (1 - 0.7) * 10 is a rounding above 3.
    assert top(np.ones(10), rate=0.7, tie_breakers=np.arange(10, dtype=np.uint64)).sum() == 3


def test_policies_cost_the_variance_of_the_published_table() -> None:
    rng = np.random.default_rng(1)
    added: list[tuple[float, float, float, float]] = []
    for _ in range(100):
        right = rng.random((64, 8)) < rng.beta(0.6, 0.6, size=(64, 1))
        grpo = GrpoConfig(use_leave_one_out_baseline=False)
        scores = np.abs(group_advantages(right.astype(np.float64), grpo=grpo)).ravel()
        scores = scores[scores > 0]
        groups = np.zeros(len(scores), np.int64)
        by_threshold = threshold(scores, groups=groups, rate=0.7, min_keep_probability=0.05)
        kept = float(by_threshold.mean())
        all_three = (
            by_threshold,
            neyman(scores, rate=1 - kept, min_keep_probability=0.05),
            uniform(scores, rate=1 - kept, min_keep_probability=0.05),
        )
        costs = [float(((1 / p - 1) * scores**2).sum() / (scores**2).sum()) for p in all_three]
        added.append((kept, costs[0], costs[1], costs[2]))
    np.testing.assert_allclose(np.mean(added, axis=0), [0.53, 0.491, 0.385, 0.877], rtol=0.04)
