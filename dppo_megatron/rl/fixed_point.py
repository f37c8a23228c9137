"""Scores as integers, whose sums do not depend on their order."""

import numpy as np

from dppo_megatron.batches import FloatArray, IntArray

_BITS = 32


def to_fixed_point(scores: FloatArray) -> tuple[IntArray, int]:
    """Round scores to ``values / 2**shift``, values at most 2**32 in size: (int64 of the same shape, shift).

    The shift depends on the largest score alone. Sums of up to 2**30 values, and values times such a count,
    are exact in int64. Scores that differ by the rounding of a float almost always become equal.
    """
    assert np.isfinite(scores).all()
    _, exponent = np.frexp(np.abs(scores).max(initial=0.0))
    shift = _BITS - int(exponent)
    return np.rint(np.ldexp(scores, shift)).astype(np.int64), shift


def from_fixed_point(values: FloatArray, *, shift: int) -> FloatArray:
    """Undo ``to_fixed_point`` on sums or means of its values."""
    return np.ldexp(values, -shift)
