"""Sequences in bins, and what a bin may hold to become a THD row."""

from dataclasses import dataclass

import numpy as np

from dppo_megatron.batches import IntArray


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What a row may hold, in tokens.

    capacity: padded tokens of a row at most. sequence_multiple, row_multiple: what each sequence and each
    row is padded to.
    Raises: ValueError where not even the smallest row is within the capacity.
    """

    capacity: int
    sequence_multiple: int
    row_multiple: int

    def __post_init__(self) -> None:
        assert self.sequence_multiple >= 1
        assert self.row_multiple >= 1
        if self.capacity < max(self.sequence_multiple, self.row_multiple):
            raise ValueError(
                f"policy.sequence_packing.train_mb_tokens: {self.capacity}; allowed in this layout, which pads"
                f" sequences to {self.sequence_multiple} and rows to {self.row_multiple}: the larger and more"
            )

    @property
    def room(self) -> int:
        """Padded tokens of sequences that a row can hold: the padded row, too, is within the capacity."""
        row = self.capacity // self.row_multiple * self.row_multiple
        return row // self.sequence_multiple * self.sequence_multiple

    def pad_sequences(self, lengths: IntArray) -> IntArray:
        """Padded tokens of sequences [K]."""
        return -(-lengths // self.sequence_multiple) * self.sequence_multiple

    def pad_rows(self, tokens: IntArray) -> IntArray:
        """Padded tokens of rows with the given padded sequences; an empty row is one multiple of padding."""
        return np.maximum(-(-tokens // self.row_multiple), 1) * self.row_multiple

    def in_units(self, padded: IntArray) -> tuple[IntArray, int]:
        """Padded lengths [K] and the room of a row, in units of ``sequence_multiple``."""
        return padded // self.sequence_multiple, self.room // self.sequence_multiple


@dataclass(frozen=True, slots=True)
class Bins:
    """Sequences in bins, each within the limits of a row.

    lengths: int64 [K], unpadded tokens. bin_of: int64 [K], 0 .. num_bins - 1.
    """

    lengths: IntArray
    bin_of: IntArray
    num_bins: int
    limits: RowLimits

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.bin_of)
        assert not len(self.bin_of) or self.bin_of.max() < self.num_bins

    @classmethod
    def from_list(cls, lengths: IntArray, bin_of: list[int], limits: RowLimits) -> "Bins":
        """Wrap the answer of a packing algorithm."""
        return cls(lengths, np.array(bin_of, np.int64), max(bin_of, default=-1) + 1, limits)

    @property
    def padded_lengths(self) -> IntArray:
        """Tokens of each padded sequence, int64 [K]."""
        return self.limits.pad_sequences(self.lengths)
