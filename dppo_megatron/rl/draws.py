"""Counter-based random streams: every draw is a pure function of its key.

No generator holds state, so a draw does not depend on which rank asks, in which order, on which layout,
or on whether the run was restarted before it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dppo_megatron.batches import Purpose

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def hash_parts(*parts: ArrayLike) -> NDArray[np.uint64]:
    """Hash integers, broadcast against each other, to well-mixed 64-bit words.

    Source: the finaliser of splitmix64 (Steele et al., OOPSLA 2014), chained over the parts.
    """
    with np.errstate(over="ignore"):
        word = np.zeros(np.broadcast_shapes(*(np.shape(part) for part in parts)), np.uint64)
        for part in parts:
            word = (word + _GOLDEN) ^ np.asarray(part).astype(np.uint64)
            word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            word = word ^ (word >> np.uint64(31))
    return word


def to_unit_interval(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map 64-bit words to floats in [0, 1), exactly representable (53 bits)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Draws:
    """The random streams of one step, the same on every rank."""

    seed: int
    step: int

    def words(self, purpose: Purpose, *parts: ArrayLike) -> NDArray[np.uint64]:
        """64-bit words keyed by (seed, step, purpose, parts), of the parts' broadcast shape."""
        return hash_parts(self.seed, self.step, int(purpose), *parts)

    def uniform(self, purpose: Purpose, *parts: ArrayLike) -> NDArray[np.float64]:
        """Uniform floats in [0, 1) keyed by (seed, step, purpose, parts)."""
        return to_unit_interval(self.words(purpose, *parts))
