"""Training rows cut and joined into other rows, and values of the tokens brought back."""

import numpy as np
import pytest
import torch

from dppo_megatron.batches import PackedRow, Ragged
from dppo_megatron.config.schema import SequencePackingConfig
from dppo_megatron.parallel.regrouping import Regrouping, lengths_in, regroup
from dppo_megatron.parallel.sequence_layout import RowSequences, lay_out_row
from dppo_megatron.rl.packing import plan_rows

# Sequences of three training rows, one of them padding alone; every token of all is another number.
LENGTHS = ([13, 6, 2], [], [9, 4])


def training_rows(*, sequence_multiple: int, row_multiple: int, cp_size: int, cp_rank: int) -> list[PackedRow]:
    """The rows of one context-parallel rank."""
    result, first = [], 1
    for lengths in LENGTHS:
        tokens = Ragged.from_lengths(np.arange(first, first + sum(lengths)), np.array(lengths, np.int64))
        first += sum(lengths)
        result.append(
            lay_out_row(
                RowSequences(
                    prompts=Ragged.from_rows(
                        [row[:1].tolist() for row in map(tokens.__getitem__, range(len(tokens)))]
                    ),
                    completions=Ragged.from_rows([tokens[row][1:].tolist() for row in range(len(tokens))]),
                    sampled_logprobs=np.zeros(sum(lengths) - len(lengths), np.float32),
                    advantages=np.ones(len(lengths)),
                    coefficients=np.ones(len(lengths)),
                ),
                sequence_multiple=sequence_multiple,
                row_multiple=row_multiple,
                cp_size=cp_size,
                cp_rank=cp_rank,
            )
        )
    return result


def regrouped(
    rows: list[PackedRow], *, capacity: int, sequence_multiple: int, row_multiple: int, cp: int
) -> Regrouping:
    plan = plan_rows(
        lengths_in(rows),
        config=SequencePackingConfig(),
        window=None,
        capacity=capacity,
        sequence_multiple=sequence_multiple,
        row_multiple=row_multiple,
        dp_size=1,
    )
    return regroup(rows, plan, cp_size=cp)


CASES = [
    (16, 1, 1, 1, 0),  # smaller rows than those of training
    (64, 1, 8, 1, 0),  # one row for all
    (48, 4, 8, 2, 0),
    (48, 4, 8, 2, 1),
]


@pytest.mark.parametrize(("capacity", "sequence_multiple", "row_multiple", "cp_size", "cp_rank"), CASES)
def test_every_sequence_stands_whole_in_one_row_within_the_cap(
    capacity: int, sequence_multiple: int, row_multiple: int, cp_size: int, cp_rank: int
) -> None:
    multiples = {"sequence_multiple": sequence_multiple, "row_multiple": row_multiple}
    rows = training_rows(**multiples, cp_size=cp_size, cp_rank=cp_rank)
    other = regrouped(rows, capacity=capacity, cp=cp_size, **multiples)

    def sequences(packed: PackedRow) -> list[tuple[list[int], ...]]:
        sizes = (packed.sequence_lengths // cp_size).tolist()
        parts = zip(
            packed.token_ids.split(sizes), packed.labels.split(sizes), packed.positions.split(sizes), strict=True
        )
        return [tuple(part.tolist() for part in one) for one in parts][: packed.num_sequences]

    assert sorted(one for row in other.rows for one in sequences(row)) == sorted(
        one for row in rows for one in sequences(row)
    )
    for row in other.rows:
        assert len(row.token_ids) * cp_size == row.sequence_lengths.sum() == int(row.cu_seqlens[-1]) <= capacity
        assert row.sequence_lengths.sum() % row_multiple == 0
        assert not row.coefficients.any()


@pytest.mark.parametrize(("capacity", "sequence_multiple", "row_multiple", "cp_size", "cp_rank"), CASES)
def test_values_come_back_to_their_tokens(
    capacity: int, sequence_multiple: int, row_multiple: int, cp_size: int, cp_rank: int
) -> None:
    multiples = {"sequence_multiple": sequence_multiple, "row_multiple": row_multiple}
    rows = training_rows(**multiples, cp_size=cp_size, cp_rank=cp_rank)
    other = regrouped(rows, capacity=capacity, cp=cp_size, **multiples)

    back = other.to_training_rows([row.token_ids * 10.0 for row in other.rows])

    assert sum(row.num_sequences for row in rows) == sum(map(len, LENGTHS))
    for values, row in zip(back, rows, strict=True):
        assert torch.equal(values, row.token_ids * 10.0)  # padding has token 0


def test_rows_of_padding_alone_regroup_to_one_of_them() -> None:
    rows = training_rows(sequence_multiple=1, row_multiple=8, cp_size=1, cp_rank=0)[1:2]
    other = regrouped(rows, capacity=16, sequence_multiple=1, row_multiple=8, cp=1)
    assert [row.num_sequences for row in other.rows] == [0]
    assert [values.tolist() for values in other.to_training_rows([torch.ones(8)])] == [[0.0] * 8]
