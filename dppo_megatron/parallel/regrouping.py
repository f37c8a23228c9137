"""Rows for passes without gradients: the sequences of a rank's training rows under a cap of their own.

The tokens are where they have to be already, so nothing moves between ranks: rows are cut and joined on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dppo_megatron import device
from dppo_megatron.batches import IntArray, PackedRow, RowPlan
from dppo_megatron.parallel.sequence_layout import runs


@dataclass(frozen=True, slots=True)
class Regrouping:
    """The sequences of training rows in other rows, which train nothing, and the way back.

    rows: the other rows. sources: int64 [L], where their sequences' tokens stand in ``rows``, end to end;
    destinations: int64 [L], where in the training rows. row_tokens: of each training row, on this rank.
    """

    rows: tuple[PackedRow, ...]
    sources: Tensor
    destinations: Tensor
    row_tokens: tuple[int, ...]

    def to_training_rows(self, values: Sequence[Tensor]) -> list[Tensor]:
        """One value a token of ``rows``, [T] each, to the training rows; zero where those are padding."""
        flat = torch.cat(list(values))
        result = flat.new_zeros(sum(self.row_tokens))
        result[self.destinations] = flat[self.sources]
        return list(result.split(self.row_tokens))


def lengths_in(rows: Sequence[PackedRow]) -> IntArray:
    """Padded tokens in the whole row of each sequence of the rows, int64 [all]."""
    return np.concatenate([row.sequence_lengths[: row.num_sequences] for row in rows])


def regroup(rows: Sequence[PackedRow], plan: RowPlan, *, cp_size: int) -> Regrouping:
    """Put the sequences of this rank's training rows into the rows that a plan for one rank names.

    plan: of ``lengths_in(rows)``. Data-parallel ranks may come to different numbers of rows: a pass without gradients
    crosses none of them.
    """
    row_tokens = [len(row.token_ids) for row in rows]
    row_starts = np.cumsum(row_tokens) - row_tokens
    lengths = lengths_in(rows)
    starts = np.concatenate([start + _starts(row, cp_size) for start, row in zip(row_starts, rows, strict=True)])
    tokens = torch.stack([torch.cat([getattr(row, name) for row in rows]) for name in _INTEGERS])
    regrouped, destinations, sources, offset = [], [], [], 0
    for chosen in plan.rows[0]:
        places = runs(starts[chosen], lengths[chosen] // cp_size)
        padding = -lengths[chosen].sum() % plan.row_multiple if len(chosen) else plan.row_multiple
        regrouped.append(_row(tokens, places, lengths=lengths[chosen], padding=int(padding), cp_size=cp_size))
        destinations.append(places)
        sources.append(offset + np.arange(len(places)))
        offset += len(regrouped[-1].token_ids)
    return Regrouping(
        rows=tuple(regrouped),
        sources=device.upload(np.concatenate(sources)),
        destinations=device.upload(np.concatenate(destinations)),
        row_tokens=tuple(row_tokens),
    )


_INTEGERS = ("token_ids", "labels", "positions")


def _starts(row: PackedRow, cp_size: int) -> IntArray:
    """Where in the row each of its sequences starts on this rank, int64 [num_sequences]."""
    return (row.sequence_lengths.cumsum() - row.sequence_lengths)[: row.num_sequences] // cp_size


def _row(tokens: Tensor, places: IntArray, *, lengths: IntArray, padding: int, cp_size: int) -> PackedRow:
    """The tokens [3, all] at the given places, and padding, for which any token will do."""
    padded = np.append(lengths, padding) if padding else lengths
    token_ids, labels, positions = tokens[:, device.upload(np.append(places, np.zeros(padding // cp_size, np.int64)))]
    nothing = torch.zeros(len(token_ids), device=token_ids.device)
    return PackedRow(
        token_ids=token_ids,
        labels=labels,
        positions=positions,
        coefficients=nothing,
        advantages=nothing,
        sampled_logprobs=nothing,
        cu_seqlens=device.upload(np.append(0, padded.cumsum()).astype(np.int32)),
        sequence_lengths=padded,
        num_sequences=len(lengths),
    )
