"""How FP8 recipes choose scales, worked out in plain torch: values are quantised and dequantised at once.

What comes back is float32 and holds exactly what an FP8 tensor with its scales would stand for. Rounding is torch's
own cast to its float8 types, to nearest even; what lies beyond the largest number is that number, as in Transformer
Engine. Source: Transformer Engine 2.11, ``common/recipe`` and the quantizers of ``pytorch/tensor``.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST = torch.finfo(torch.float32).max


class Quantizer(Protocol):
    """Quantises and dequantises the operands of one kind, such as a linear's inputs."""

    def __call__(self, values: Tensor, *, contracted: int) -> Tensor:
        """What FP8 makes of a matrix, float32; ``contracted``: the dimension that the product will sum over."""
        ...


def round_trip(values: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """Multiply by the scale, cast to FP8, and undo both; float32, of the values' shape.

    scale: float32, broadcast against the values. kind: E4M3 or E5M2.
    """
    largest = torch.finfo(kind).max
    return (values.float() * scale).clamp(-largest, largest).to(kind).float() * scale.reciprocal()


def full_scale(amax: Tensor, kind: torch.dtype) -> Tensor:
    """The scale that takes the largest magnitude to the largest FP8 number; 1 where that is 0 or not finite."""
    scale = (torch.finfo(kind).max / amax).clamp(max=_LARGEST)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


def power_of_two_scale(amax: Tensor, kind: torch.dtype) -> Tensor:
    """The greatest power of two not above ``full_scale``: blockwise scaling's."""
    _, exponent = torch.frexp(full_scale(amax, kind))
    return torch.ldexp(torch.ones_like(amax), exponent - 1)


def e8m0_scale(amax: Tensor, kind: torch.dtype) -> Tensor:
    """The inverse of amax / largest, rounded up to a power of two that E8M0 holds: MXFP8's; 1 where amax is 0."""
    mantissa, exponent = torch.frexp(amax * amax.new_tensor(1 / torch.finfo(kind).max))
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1).clamp(-126, 127)
    scale = torch.ldexp(torch.ones_like(amax), -exponent)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


@dataclass(frozen=True)
class CurrentScaling:
    """One scale a tensor, from its own largest magnitude."""

    kind: torch.dtype

    def __call__(self, values: Tensor, *, contracted: int) -> Tensor:
        return round_trip(values, full_scale(values.abs().amax().float(), self.kind), self.kind)


@dataclass(frozen=True)
class BlockScaling:
    """One scale a block of ``length`` values along the contracted dimension; ``square``: length x length blocks.

    The last blocks of a dimension that ``length`` does not divide are smaller.
    """

    kind: torch.dtype
    length: int
    square: bool
    scale_of: Callable[[Tensor, torch.dtype], Tensor]

    def __call__(self, values: Tensor, *, contracted: int) -> Tensor:
        height, width = (self.length if self.square or dim == contracted else 1 for dim in (0, 1))
        scales = self.scale_of(_block_amax(values, height, width), self.kind)
        spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)
        return round_trip(values, spread[: values.size(0), : values.size(1)], self.kind)


def _block_amax(values: Tensor, height: int, width: int) -> Tensor:
    rows, columns = math.ceil(values.size(0) / height), math.ceil(values.size(1) / width)
    missing = (0, columns * width - values.size(1), 0, rows * height - values.size(0))
    padded = torch.nn.functional.pad(values.abs().float(), missing)
    return padded.view(rows, height, columns, width).amax((1, 3))


class DelayedScaling:
    """One scale a tensor, from the largest magnitudes of earlier micro-batches; 1 before the first is known."""

    def __init__(self, kind: torch.dtype, *, margin: int, history_length: int, most_recent: bool) -> None:
        self._kind, self._margin, self._most_recent = kind, margin, most_recent
        self._history: deque[Tensor] = deque(maxlen=history_length)
        self._scale: Tensor | None = None
        self._seen: Tensor | None = None

    def __call__(self, values: Tensor, *, contracted: int) -> Tensor:
        amax = values.abs().amax().float()
        self._seen = amax if self._seen is None else torch.maximum(self._seen, amax)
        return round_trip(values, amax.new_ones(()) if self._scale is None else self._scale, self._kind)

    @property
    def seen(self) -> Tensor | None:
        """The largest magnitude since the last ``update``; None where no tensor came by."""
        return self._seen

    def update(self, amax: Tensor) -> None:
        """Take the largest magnitude of all ranks into the history and choose the next scale."""
        self._history.append(amax)
        chosen = amax if self._most_recent else torch.stack(tuple(self._history)).amax()
        if float(chosen) > 0 and math.isfinite(float(chosen)):
            self._scale = full_scale(chosen, self._kind) / 2**self._margin
        self._seen = None
