"""Claims about updates whose loss or gradients are not finite."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dppo_megatron import device
from dppo_megatron.batches import PackedRow, TrainStats
from dppo_megatron.parallel.mesh import Axis
from dppo_megatron.skipped_updates import SkippedUpdates


@pytest.fixture
def world() -> Iterator[Axis]:
    """This process alone."""
    device.start_process_group()
    assert torch.distributed.group.WORLD is not None
    yield Axis.of("world", torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()


def stats(*, skipped: bool) -> TrainStats:
    """An update's statistics."""
    return TrainStats(math.nan if skipped else 0.5, 1.0, 1e-3, num_tokens=4, metrics=(), skipped=skipped)


def row() -> PackedRow:
    """A row of four tokens, one advantage infinite."""
    return PackedRow(
        token_ids=torch.arange(4),
        labels=torch.arange(4),
        positions=torch.arange(4),
        coefficients=torch.ones(4),
        advantages=torch.tensor([0.0, 1.0, math.inf, 1.0]),
        sampled_logprobs=torch.zeros(4),
        cu_seqlens=torch.tensor([0, 4], dtype=torch.int32),
        sequence_lengths=np.array([4]),
        num_sequences=1,
    )


def test_only_updates_skipped_in_a_row_end_the_run_and_the_rows_are_saved(world: Axis, tmp_path: Path) -> None:
    skipped = SkippedUpdates(limit=2, directory=tmp_path, world=world)
    for step, bad in enumerate([True, False, True]):
        skipped.note(stats(skipped=bad), [row()], step=step)
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="2 updates in a row"):
        skipped.note(stats(skipped=True), [row(), row()], step=7)
    saved = torch.load(tmp_path / "non_finite" / "step_7_rank_0.pt", weights_only=True)
    assert len(saved) == 2
    torch.testing.assert_close(saved[0]["advantages"], row().advantages)
    assert saved[0]["sequence_lengths"].tolist() == [4]
