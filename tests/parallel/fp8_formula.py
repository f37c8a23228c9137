"""FP8 by its definition, in numpy and float64: numbers, scales and blocks, sharing nothing with what is tested."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Format -> bits of the mantissa, exponent of the least normal number, largest number.
FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}


def rounded(values: Array, kind: str) -> Array:
    """To the nearest number of the format, ties to even, the largest beyond it."""
    mantissa, least, largest = FORMATS[kind]
    magnitude = np.abs(values)
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.floor(np.log2(magnitude)), least)
    step = 2.0 ** (exponent - mantissa)
    return np.sign(values) * np.minimum(np.rint(magnitude / step) * step, largest)


def to_largest(amax: float, kind: str) -> float:
    """The scale that takes amax to the largest number."""
    return FORMATS[kind][2] / amax if amax else 1.0


def power_of_two(amax: float, kind: str) -> float:
    """The same, rounded down to a power of two."""
    return 2.0 ** math.floor(math.log2(to_largest(amax, kind)))


def e8m0(amax: float, kind: str) -> float:
    """The inverse of a power of two, rounded up: E8M0's scale."""
    return 2.0 ** -math.ceil(math.log2(amax / FORMATS[kind][2])) if amax else 1.0


def in_blocks(values: Array, kind: str, *, height: int, width: int, scale_of: Callable[[float, str], float]) -> Array:
    """Each block of a matrix by a scale of its own."""
    found = np.empty_like(values)
    for row in range(0, values.shape[0], height):
        for column in range(0, values.shape[1], width):
            block = np.s_[row : row + height, column : column + width]
            scale = scale_of(float(np.abs(values[block]).max()), kind)
            found[block] = rounded(values[block] * scale, kind) / scale
    return found


def quantized(values: Array, *, recipe: str, kind: str, contracted: int, is_weight: bool) -> Array:
    """What a recipe makes of an operand whose dimension ``contracted`` is summed over."""
    if recipe == "tensorwise":
        return in_blocks(values, kind, height=10**9, width=10**9, scale_of=to_largest)
    length, scale_of = (128, power_of_two) if recipe == "blockwise" else (32, e8m0)
    square = is_weight and recipe == "blockwise"
    height, width = (length if square or dim == contracted else 1 for dim in (0, 1))
    return in_blocks(values, kind, height=height, width=width, scale_of=scale_of)
