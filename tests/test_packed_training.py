import numpy as np

from dppo_megatron.batches import PackedRow
from tools.benchmarks.packed_training import Batch, lay_out_batch

BATCH = Batch("toy", np.array([2, 3, 5, 2]), np.array([4, 1, 7, 2]), capacity=24, vocab_size=50)


def contents(rows: list[PackedRow]) -> list[tuple[list[int], list[float]]]:
    """The trained tokens of every sequence of the rows and their loss terms' weights, sorted."""
    parts = []
    for row in rows:
        bounds = np.append(0, row.sequence_lengths.cumsum())
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            trained = row.coefficients[start:end] != 0
            terms = (row.coefficients * row.advantages)[start:end][trained]
            parts.append((row.labels[start:end][trained].tolist(), terms.tolist()))
    return sorted(parts)


def test_both_layouts_train_the_same_and_one_is_padded_to_the_longest() -> None:
    packed, padded = (lay_out_batch(BATCH, sequence_multiple=multiple) for multiple in (1, 12))

    assert contents(packed) == contents(padded)
    assert len(contents(packed)) == len(BATCH.lengths)
    assert sum(len(row.token_ids) for row in packed) == BATCH.lengths.sum()
    assert {length for row in padded for length in row.sequence_lengths.tolist()} == {12}
