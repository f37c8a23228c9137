"""The audit: estimates of the gradient against full-batch gradients, on one fixed random projection."""

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dppo_megatron.batches import FloatArray, Purpose
from dppo_megatron.rl.draws import hash_parts

SKETCH_SIZE = 4096
_CHUNK = 1 << 24  # parameters whose places are drawn at once


def sketch(gradient: Iterable[tuple[str, Tensor]], *, seed: int) -> FloatArray:
    """Project a gradient, tensor by tensor, to float64 [SKETCH_SIZE]; linear, and the same map at every call.

    Each entry is added with a random sign to a random place, which keeps inner products in expectation, to about
    1 / sqrt(SKETCH_SIZE) of the two norms. seed: of the map.

    Source: Charikar et al., "Finding Frequent Items in Data Streams", ICALP 2002 (count sketch).
    """
    total = np.zeros(SKETCH_SIZE)
    for name, tensor in gradient:
        key = int(hash_parts(seed, int(Purpose.AUDIT), zlib.crc32(name.encode()))) >> 1
        draw = torch.Generator(tensor.device).manual_seed(key)
        sums = torch.zeros(SKETCH_SIZE, dtype=torch.float64, device=tensor.device)
        for part in tensor.flatten().split(_CHUNK):
            # One draw decides place and sign.
            places = torch.randint(2 * SKETCH_SIZE, part.shape, generator=draw, device=part.device)
            signs = (places % 2 * 2 - 1).to(sums)
            sums.index_add_(0, places // 2, part.to(sums) * signs)
        total += sums.cpu().numpy()
    return total


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Estimates against full gradients.

    cosine, relative_error: of this step alone. mean_cosine, mean_relative_error: of the mean estimate against the
    mean full gradient over all audited steps. standard_error: what ``mean_relative_error`` is about where the
    estimator is unbiased; None at the first audited step. num_steps: audited so far.
    """

    cosine: float
    relative_error: float
    mean_cosine: float
    mean_relative_error: float
    standard_error: float | None
    num_steps: int


class Audit:
    """Running sums over the audited steps of a run."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._estimates = np.zeros(SKETCH_SIZE)
        self._full = np.zeros(SKETCH_SIZE)
        self._squared_errors = 0.0

    @classmethod
    def from_state(cls, state: dict[str, NDArray[Any]]) -> "Audit":
        """Go on where ``state`` was taken, bit for bit."""
        audit = cls()
        audit._num_steps = int(state["num_steps"])
        audit._estimates, audit._full = state["estimates"].copy(), state["full"].copy()
        audit._squared_errors = float(state["squared_errors"])
        return audit

    def state(self) -> dict[str, NDArray[Any]]:
        """What a checkpoint needs, float64 but for the count; empty before the first audited step."""
        if not self._num_steps:
            return {}
        return {
            "num_steps": np.array(self._num_steps),
            "estimates": self._estimates,
            "full": self._full,
            "squared_errors": np.array(self._squared_errors),
        }

    def add(self, estimate: FloatArray, *, full: FloatArray) -> AuditReport:
        """Take one step's sketches of the estimate and of the full gradient."""
        self._num_steps += 1
        self._estimates += estimate
        self._full += full
        self._squared_errors += float(((estimate - full) ** 2).sum())
        count = self._num_steps
        norm = max(float(np.linalg.norm(self._full)) / count, np.finfo(np.float64).tiny)
        mean_error = float(np.linalg.norm(self._estimates - self._full)) / count
        standard_error = None
        if count > 1:
            scatter = max(self._squared_errors - count * mean_error**2, 0.0)
            standard_error = float(np.sqrt(scatter / (count * (count - 1)))) / norm
        return AuditReport(
            cosine=_cosine(estimate, full),
            relative_error=float(np.linalg.norm(estimate - full)) / max(float(np.linalg.norm(full)), 1e-300),
            mean_cosine=_cosine(self._estimates, self._full),
            mean_relative_error=mean_error / norm,
            standard_error=standard_error,
            num_steps=count,
        )


def _cosine(one: FloatArray, other: FloatArray) -> float:
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / norms if norms else 0.0
