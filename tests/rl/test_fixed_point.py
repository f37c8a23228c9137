"""Scores as integers."""

import numpy as np
import pytest

from dppo_megatron.rl.fixed_point import from_fixed_point, to_fixed_point


@pytest.mark.parametrize("size", [1e-300, 1e-9, 1.0, 3.75, 1e9, 1e300])
def test_a_round_trip_keeps_32_bits_at_every_magnitude(size: float) -> None:
    scores = size * np.random.default_rng(0).random(100)
    values, shift = to_fixed_point(scores)
    assert np.abs(values).max() <= 2**32
    error = np.abs(from_fixed_point(values.astype(np.float64), shift=shift) - scores).max()
    assert error <= 2.0**-32 * scores.max()


def test_integer_sums_do_not_depend_on_the_order_where_float_sums_do() -> None:
    rng = np.random.default_rng(1)
    scores = rng.random(1000)
    orders = [rng.permutation(1000) for _ in range(20)]
    assert len({sum(scores[order].tolist()) for order in orders}) > 1
    assert len({int(to_fixed_point(scores[order])[0].sum()) for order in orders}) == 1


def test_scores_that_differ_by_a_rounding_become_equal() -> None:
    values, _ = to_fixed_point(np.array([0.3, 0.1 + 0.2, 1.0]))
    assert 0.3 != 0.1 + 0.2
    assert values[0] == values[1]


def test_no_scores_and_zero_scores_are_allowed() -> None:
    assert len(to_fixed_point(np.zeros(0))[0]) == 0
    assert not to_fixed_point(np.zeros(3))[0].any()
