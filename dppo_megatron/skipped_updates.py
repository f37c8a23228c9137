"""What becomes of updates whose loss or gradients were not finite: counted, and at last the run ends."""

import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from dppo_megatron.batches import PackedRow, TrainStats
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.mesh import Axis

logger = logging.getLogger(__name__)

DIRECTORY = "non_finite"


class SkippedUpdates:
    """Counts the updates skipped in a row, the same on every rank."""

    def __init__(self, *, limit: int, directory: Path, world: Axis) -> None:
        self._limit, self._directory, self._world = limit, directory / DIRECTORY, world
        self._in_a_row = 0

    def note(self, stats: TrainStats, rows: Sequence[PackedRow], *, step: int) -> None:
        """Take note of an update; called by every rank.

        Raises: RuntimeError on all ranks after ``limit`` skipped updates in a row, once each has saved its rows of
        the last one, ``non_finite/step_S_rank_R.pt``: a list of dicts of tensors, for ``torch.load``.
        """
        self._in_a_row = self._in_a_row + 1 if stats.skipped else 0
        if not stats.skipped:
            return
        if self._world.is_first:
            logger.warning(
                "step %d: loss or gradients are not finite (loss %s); all ranks skip the update, %d in a row",
                step + 1,
                stats.loss,
                self._in_a_row,
            )
        if self._in_a_row < self._limit:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        torch.save([_contents(row) for row in rows], self._directory / f"step_{step}_rank_{self._world.rank}.pt")
        collectives.barrier(self._world)
        raise RuntimeError(
            f"{self._in_a_row} updates in a row had a loss or gradients that were not finite "
            f"(dppo.max_skipped_updates); the rows of the last are in {self._directory}"
        )


def _contents(row: PackedRow) -> dict[str, object]:
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    # As tensors, so that torch.load needs no unpickling of code.
    return {name: torch.as_tensor(one) if isinstance(one, np.ndarray) else one for name, one in values.items()}
