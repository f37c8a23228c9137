"""Keep probabilities from scores: one function a policy, each independent of the order of the scores."""

import math

import numpy as np
from numpy.typing import NDArray

from dppo_megatron.batches import FloatArray, IntArray
from dppo_megatron.rl.fixed_point import to_fixed_point


def threshold(scores: FloatArray, *, groups: IntArray, rate: float, min_keep_probability: float) -> FloatArray:
    """1 - rate below the mean score of an item's group, 1 elsewhere: float64 [N] from scores, groups [N].

    Source: Zhu et al., arXiv 2603.04135, where the mean is a float; it is exact here, so that
    ties with it do not depend on the order of the sum.
    """
    values, _ = to_fixed_point(scores)
    sizes = np.bincount(groups)
    sums = np.zeros(len(sizes), np.int64)
    np.add.at(sums, groups, values)
    below = sizes[groups] * values < sums[groups]
    return np.where(below, max(1 - rate, min_keep_probability), 1.0)


def neyman(scores: FloatArray, *, rate: float, min_keep_probability: float) -> FloatArray:
    """clip(c * score, min_keep_probability, 1) with c such that the mean is 1 - rate: float64 [N] from [N].

    Minimises the added variance sum (1 / p - 1) score**2 at that expected number kept. Where the positive
    scores cannot use up the budget even with p = 1, the rest is spread evenly over the zero scores, so that
    the mean is 1 - rate for every batch and a rate of 0 keeps everything.

    Source: Neyman, J. R. Stat. Soc. 97 (1934), optimal allocation.
    """
    values, _ = to_fixed_point(scores)
    positive = values > 0
    num_zero = int((~positive).sum())
    budget = max(1 - rate, min_keep_probability) * len(values)
    rest = budget - (len(values) - num_zero)
    if rest >= min_keep_probability * num_zero:
        return np.where(positive, 1.0, rest / max(num_zero, 1))
    scale = _fill(
        np.sort(values[positive])[::-1],
        target=budget - min_keep_probability * num_zero,
        floor=min_keep_probability,
    )
    return np.clip(scale * values.astype(np.float64), min_keep_probability, 1.0)


def uniform(scores: FloatArray, *, rate: float, min_keep_probability: float) -> FloatArray:
    """1 - rate for every item: the control. float64 [N] from [N]."""
    return np.full(len(scores), max(1 - rate, min_keep_probability))


def top(scores: FloatArray, *, rate: float, tie_breakers: NDArray[np.uint64]) -> FloatArray:
    """1 for the highest 1 - rate of the scores, 0 for the others: float64 [N] from [N]. Biased.

    Equal scores are taken by rising tie_breakers [N]: by order, the first mini-batch would get them all.

    Source: CPPO, Lin et al., arXiv 2503.22342, over the batch instead of each group.
    """
    values, _ = to_fixed_point(scores)
    # 1 - rate is often a rounding above the fraction that was meant.
    num_kept = math.ceil((1 - rate) * len(values) - 1e-9)
    probabilities = np.zeros(len(values))
    probabilities[np.lexsort((tie_breakers, -values))[:num_kept]] = 1.0
    return probabilities


def _fill(falling: IntArray, *, target: float, floor: float) -> float:
    """The c with sum(clip(c * falling, floor, 1)) = target, for floor * n <= target < n.

    The sum is piecewise linear in c: it bends where an item leaves the floor and where it reaches 1.
    """
    prefix = np.concatenate([[0], np.cumsum(falling)])
    leaves_floor, reaches_one = floor / falling, 1 / falling
    bends = np.sort(np.concatenate([leaves_floor, reaches_one]))
    num_left = np.searchsorted(leaves_floor, bends, side="right")
    num_full = np.searchsorted(reaches_one, bends, side="right")
    at_floor_or_one = floor * (len(falling) - num_left) + num_full
    slopes = prefix[num_left] - prefix[num_full]
    end = int(np.searchsorted(at_floor_or_one + slopes * bends, target))
    start = end - 1
    if start < 0 or slopes[start] == 0:
        return float(bends[end])
    scale = (target - at_floor_or_one[start]) / slopes[start]
    return float(np.clip(scale, bends[start], bends[end]))
