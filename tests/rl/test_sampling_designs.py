"""Which items are kept."""

import numpy as np
import pytest

from dppo_megatron.rl.sampling_designs import bernoulli, round_up_to_ticks, systematic

RNG = np.random.default_rng(0)
KEYS = RNG.integers(0, 2**64, 40, np.uint64)
# Multiples of 1/64, so that 64 starts stand for all of [0, 1).
PROBABILITIES = np.append(RNG.integers(1, 64, 38) / 64, [0.0, 1.0])
STARTS = (np.arange(64) + 0.5) / 64


def test_systematic_keeps_each_item_with_exactly_its_probability() -> None:
    kept = np.array([systematic(PROBABILITIES, keys=KEYS, start=start) for start in STARTS])
    np.testing.assert_array_equal(kept.mean(axis=0), PROBABILITIES)


def test_systematic_keeps_a_number_within_one_of_the_expected_one() -> None:
    for start in STARTS:
        number = systematic(PROBABILITIES, keys=KEYS, start=start).sum()
        assert abs(number - PROBABILITIES.sum()) < 1


def test_systematic_lays_items_out_in_the_order_of_their_keys() -> None:
    halves = np.full(4, 0.5)
    keys = np.array([3, 0, 2, 1], np.uint64)
    np.testing.assert_array_equal(systematic(halves, keys=keys, start=0.25), [False, True, True, False])
    np.testing.assert_array_equal(systematic(halves, keys=keys, start=0.75), [True, False, False, True])


@pytest.mark.parametrize("start", [0.0, 0.3, 1 - 2.0**-53])
def test_systematic_never_drops_certain_items_nor_keeps_impossible_ones(start: float) -> None:
    rng = np.random.default_rng(2)
    # Sums of tenths are off by roundings that grow with the length.
    probabilities = rng.choice([0.0, 0.1, 0.7, 1.0], 100_000)
    keys = rng.integers(0, 2**64, len(probabilities), np.uint64)
    kept = systematic(probabilities, keys=keys, start=start)
    assert kept[probabilities == 1].all()
    assert not kept[probabilities == 0].any()
    assert abs(kept.sum() - probabilities.sum()) < 1.000001


def test_bernoulli_keeps_each_item_with_exactly_its_probability() -> None:
    keys = ((np.arange(64, dtype=np.uint64) << np.uint64(58)) + np.uint64(12345))[:, None]
    kept = np.array([bernoulli(PROBABILITIES, keys=np.broadcast_to(key, 40)) for key in keys])
    np.testing.assert_array_equal(kept.mean(axis=0), PROBABILITIES)


def test_bernoulli_draws_are_independent() -> None:
    keys = RNG.integers(0, 2**64, (2, 20_000), np.uint64)
    first, second = bernoulli(np.full((2, 20_000), 0.3), keys=keys)
    assert (first & second).mean() == pytest.approx(0.09, abs=0.01)


def test_probabilities_are_only_ever_rounded_up_and_by_one_tick_at_most() -> None:
    probabilities = np.append(RNG.random(1000), [0.0, 0.05, 1.0])
    rounded = round_up_to_ticks(probabilities)
    assert (rounded >= probabilities).all()
    assert (rounded - probabilities < 2.0**-40).all()
    assert rounded[-1] == 1
    assert rounded[-3] == 0


def test_nothing_is_drawn_from_nothing() -> None:
    empty = np.zeros(0, np.uint64)
    assert len(systematic(np.zeros(0), keys=empty, start=0.5)) == 0
    assert len(bernoulli(np.zeros(0), keys=empty)) == 0
