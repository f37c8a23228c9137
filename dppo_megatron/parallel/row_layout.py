"""What attention needs to know of a THD row, worked out once a row and carried through all layers.

Sequences of like length that stand next to each other become one batch padded on the right: under causal attention
no query sees the padding. Rows that are planned in falling length (``rl.sharing``) give few batches, most of them
without padding; any other order is as right, and slower.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from dppo_megatron import device
from dppo_megatron.batches import IntArray, PackedRow
from dppo_megatron.parallel.mesh import Axis
from dppo_megatron.parallel.sequence_layout import zigzag_positions

# Squared tokens times heads' width whose attention takes a CPU as long as one call of it does beside the work:
# what padding may cost a sequence, so that it shares a call (tools/benchmarks/packed_attention.py).
_WORK_OF_A_CALL = 2**16


@dataclass(frozen=True, slots=True)
class Padding:
    """How tokens of S sequences, end to end, become a batch [S, longest] padded on the right.

    num_tokens: of the sequences together. places: int64 [S * longest], the token that stands at each place, at a
    padded one a first token: real, so that no garbage enters the arithmetic. real: int64 [num_tokens], the place of
    each token. Both None where all sequences are equally long: then the batch is a view.
    """

    num_tokens: int
    shape: tuple[int, int]
    places: Tensor | None
    real: Tensor | None

    @classmethod
    def of(cls, lengths: IntArray) -> "Padding":
        """The padding of sequences with the given lengths [S], tokens."""
        longest = int(lengths.max())
        shape, num_tokens = (len(lengths), longest), int(lengths.sum())
        if num_tokens == len(lengths) * longest:
            return cls(num_tokens, shape, None, None)
        real = np.flatnonzero(np.arange(longest) < lengths[:, None])
        return cls(num_tokens, shape, device.upload(_padded_places(lengths).ravel()), device.upload(real))

    def pad(self, tokens: Tensor) -> Tensor:
        """[num_tokens, ...] to [S, longest, ...]; what reaches padded places on the way back is dropped: zeros."""
        if self.places is None:
            return tokens.unflatten(0, self.shape)
        return _Take.apply(tokens, self.places, self.real).unflatten(0, self.shape)  # type: ignore[no-any-return]

    def unpad(self, batch: Tensor) -> Tensor:
        """[S, longest, ...] to [num_tokens, ...]."""
        flat = batch.flatten(0, 1)
        return flat if self.real is None else flat.index_select(0, self.real)


class _Take(torch.autograd.Function):
    """Rows ``places`` of a tensor; its gradient is that of the rows ``real``, each of them taken once."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, real: Tensor) -> Tensor:
        ctx.save_for_backward(real)
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (real,) = ctx.saved_tensors
        return grad.index_select(0, real), None, None


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Neighbouring sequences of like length that attend in one call.

    queries: this rank's tokens. keys: those of all context-parallel ranks, in the order of the row.
    mask: bool [S, 1, longest query, longest key], what a query sees; None without context parallelism.
    """

    queries: Padding
    keys: Padding
    mask: Tensor | None


@dataclass
class RowLayout(PackedSeqParams):
    """megatron-core's description of a packed row, with ours.

    batches: the row's sequences in order. order: int64 [whole row], where each token of the row stands among those
    gathered from all context-parallel ranks; None without context parallelism. cosines, sines: float32
    [T, 1, d / 2], of the rotary angles of this rank's tokens.
    """

    batches: tuple[PaddedBatch, ...] = ()
    order: Tensor | None = None
    cosines: Tensor | None = None
    sines: Tensor | None = None


def row_layout(row: PackedRow, *, frequencies: Tensor, width: int, cp: Axis) -> RowLayout:
    """Work out what all layers share of a row.

    frequencies: [d / 2], angle per position of each pair of a head's channels. width: of all query heads together.
    Source: ``RotaryEmbedding`` of megatron-core, which every layer cuts and joins again by sequence.
    """
    lengths = row.sequence_lengths
    angles = row.positions.float()[:, None, None] * frequencies
    order = None
    if cp.size > 1:
        order = device.upload(zigzag_positions(lengths, cp.size).argsort(axis=None))
    return RowLayout(
        qkv_format="thd",
        cu_seqlens_q=row.cu_seqlens,
        cu_seqlens_kv=row.cu_seqlens,
        cu_seqlens_q_padded=row.cu_seqlens,
        cu_seqlens_kv_padded=row.cu_seqlens,
        max_seqlen_q=row.max_seqlen,
        max_seqlen_kv=row.max_seqlen,
        batches=padded_batches(lengths, width=width, cp_size=cp.size, cp_rank=cp.rank),
        order=order,
        cosines=angles.cos(),
        sines=angles.sin(),
    )


def padded_batches(lengths: IntArray, *, width: int, cp_size: int, cp_rank: int) -> tuple[PaddedBatch, ...]:
    """Gather neighbours of like length into batches.

    lengths: [S], tokens of the whole row, multiples of 2 * CP with context parallelism. width: of the attention's
    heads together.
    """
    # Neighbours share a batch where their squared lengths differ by less than a call is worth.
    kind = lengths**2 // max(_WORK_OF_A_CALL // width, 1)
    alike = np.split(lengths, np.flatnonzero(np.diff(kind)) + 1)
    if cp_size == 1:
        return tuple(PaddedBatch(padding, padding, None) for padding in map(Padding.of, alike))
    return tuple(
        PaddedBatch(Padding.of(group // cp_size), Padding.of(group), _mask(group, cp_size=cp_size, cp_rank=cp_rank))
        for group in alike
    )


def _mask(lengths: IntArray, *, cp_size: int, cp_rank: int) -> Tensor:
    starts = lengths.cumsum() - lengths
    places = _padded_places(lengths // cp_size)
    queries = zigzag_positions(lengths, cp_size)[cp_rank][places] - starts[:, None]
    return device.upload(queries[:, None, :, None] >= np.arange(lengths.max()))


def _padded_places(lengths: IntArray) -> IntArray:
    steps = np.arange(lengths.max())
    return (lengths.cumsum() - lengths)[:, None] + np.where(steps < lengths[:, None], steps, 0)
