"""How the tokens of packed sequences lie in a THD row, and which of them a context-parallel rank holds.

Every sequence is padded to a multiple of 2 * CP; with context parallelism rank r of CP holds chunks r and
2 * CP - 1 - r of each sequence's 2 * CP equal chunks (Megatron's and Transformer Engine's zigzag order), which
levels causal attention.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dppo_megatron import device
from dppo_megatron.batches import FloatArray, IntArray, PackedRow, Ragged


def zigzag_positions(lengths: IntArray, cp_size: int) -> IntArray:
    """Where in the whole row each context-parallel rank's tokens stand.

    lengths: [S], of the row's sequences, multiples of 2 * CP. Returns int64 [CP, T / CP], each row in the rank's
    own order.
    """
    share = lengths // cp_size
    chunk = np.repeat(share // 2, share)
    starts = np.repeat(lengths.cumsum() - lengths, share)
    within = np.arange(len(starts)) - np.repeat(share.cumsum() - share, share)
    rank = np.arange(cp_size)[:, None]
    return starts + np.where(within < chunk, rank * chunk + within, (2 * cp_size - 1 - rank) * chunk + within - chunk)


@dataclass(frozen=True, slots=True)
class RowSequences:
    """The sequences of one row before layout, S of them (none for a row of padding alone).

    prompts, completions: token ids. sampled_logprobs: float32, one a completion token.
    advantages, coefficients: float64 [S], the values of every completion token's loss term.
    """

    prompts: Ragged
    completions: Ragged
    sampled_logprobs: NDArray[np.float32]
    advantages: FloatArray
    coefficients: FloatArray


def lay_out_row(
    sequences: RowSequences, *, sequence_multiple: int, row_multiple: int, cp_size: int, cp_rank: int
) -> PackedRow:
    """Pack sequences end to end and take this context-parallel rank's tokens.

    Position t of a sequence carries the label, advantage and coefficient of token t + 1; they are laid out on
    the whole row before it is cut, so that no label crosses a rank. The row's padding is a sequence of its own.
    """
    prompt_lengths, completion_lengths = sequences.prompts.lengths, sequences.completions.lengths
    lengths = prompt_lengths + completion_lengths
    padded = -(-lengths // sequence_multiple) * sequence_multiple
    starts = padded.cumsum() - padded
    padding = -padded.sum() % row_multiple if len(padded) else row_multiple
    if padding:
        padded = np.append(padded, padding)
    row_length = int(padded.sum())

    token_ids = np.zeros(row_length, np.int64)
    token_ids[runs(starts, prompt_lengths)] = sequences.prompts.values
    token_ids[runs(starts + prompt_lengths, completion_lengths)] = sequences.completions.values
    labels = np.zeros(row_length, np.int64)
    labelled = runs(starts, np.maximum(lengths - 1, 0))
    labels[labelled] = token_ids[labelled + 1]

    actions = runs(starts + prompt_lengths - 1, completion_lengths)
    per_token = np.zeros((3, row_length), np.float32)
    per_token[0, actions] = np.repeat(sequences.coefficients, completion_lengths)
    per_token[1, actions] = np.repeat(sequences.advantages, completion_lengths)
    per_token[2, actions] = sequences.sampled_logprobs
    positions = np.arange(row_length) - np.repeat(padded.cumsum() - padded, padded)

    integers, floats = np.stack([token_ids, labels, positions]), per_token
    if cp_size > 1:
        mine = zigzag_positions(padded, cp_size)[cp_rank]
        integers, floats = integers[:, mine], floats[:, mine]
    integers, floats = (device.upload(part) for part in (integers, floats))
    return PackedRow(
        token_ids=integers[0],
        labels=integers[1],
        positions=integers[2],
        coefficients=floats[0],
        advantages=floats[1],
        sampled_logprobs=floats[2],
        cu_seqlens=device.upload(np.append(0, padded.cumsum()).astype(np.int32)),
        sequence_lengths=padded,
        num_sequences=len(lengths),
    )


def runs(starts: IntArray, lengths: IntArray) -> IntArray:
    """Indices of the runs [start, start + length), concatenated."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
