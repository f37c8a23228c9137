"""Which items are kept, given how probable each is.

Probabilities are counted in ticks of 2**-40, so that sums of them are exact: an item on that grid is kept
with exactly its probability, one at 1 always and one at 0 never. Good for 2**22 items a draw.
"""

import numpy as np
from numpy.typing import NDArray

from dppo_megatron.batches import FloatArray, IntArray

_TICK_BITS = 40
_TICKS = 1 << _TICK_BITS


def round_up_to_ticks(probabilities: FloatArray) -> FloatArray:
    """The next probabilities on the grid, at most 2**-40 higher."""
    return np.ceil(probabilities * _TICKS) / _TICKS


def systematic(probabilities: FloatArray, *, keys: NDArray[np.uint64], start: float) -> NDArray[np.bool_]:
    """Lay the items end to end in the order of their keys and keep each that a unit step from start hits.

    probabilities, keys: [N]. start: uniform in [0, 1), the only randomness besides the keys. The number
    kept differs from the expected number by less than one.

    Source: Madow, Ann. Math. Stat. 20 (1949), in random order.
    """
    order = np.argsort(keys, kind="stable")
    ends = np.cumsum(_ticks(probabilities[order]))
    steps_before_end = (ends - int(start * _TICKS) + _TICKS - 1) // _TICKS
    kept = np.zeros(len(probabilities), np.bool_)
    kept[order] = np.diff(steps_before_end, prepend=0) > 0
    return kept


def bernoulli(probabilities: FloatArray, *, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Keep each item independently, where its key [N] as a fraction of 2**64 is below its probability [N]."""
    return (keys >> np.uint64(64 - _TICK_BITS)).astype(np.int64) < _ticks(probabilities)


def _ticks(probabilities: FloatArray) -> IntArray:
    return np.rint(probabilities * _TICKS).astype(np.int64)
