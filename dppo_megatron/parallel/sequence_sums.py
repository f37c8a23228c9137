"""Sums over the sequences of a THD row, wherever context parallelism has put their tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dppo_megatron.batches import PackedRow
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.mesh import Axis


class _SumAndSpread(torch.autograd.Function):
    """Each token gets its sequence's sum. The map is symmetric, so its gradient is the same map."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sequences: Tensor, num_sequences: int, cp: Axis) -> Tensor:
        ctx.sequences, ctx.num_sequences, ctx.cp = sequences, num_sequences, cp
        return _sum_and_spread(values, sequences, num_sequences, cp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return _sum_and_spread(grad, ctx.sequences, ctx.num_sequences, ctx.cp), None, None, None


def _sum_and_spread(values: Tensor, sequences: Tensor, num_sequences: int, cp: Axis) -> Tensor:
    sums = values.new_zeros(len(values), num_sequences).index_add_(1, sequences, values)
    return collectives.sum_over(sums, cp)[:, sequences]


@dataclass(frozen=True, slots=True)
class SequenceSums:
    """Sums over sequences whose tokens lie on the ranks of an axis; called by all of its ranks for the same rows."""

    cp: Axis

    def __call__(self, values: Tensor, row: PackedRow) -> Tensor:
        """For every token the sum of values [k, T] over its sequence, [k, T], differentiable.

        Each context-parallel rank holds an equal share of every sequence (``sequence_layout``).
        """
        num_sequences = len(row.cu_seqlens) - 1
        sequences = torch.repeat_interleave(
            torch.arange(num_sequences, device=values.device),
            row.cu_seqlens.diff().long() // self.cp.size,
            output_size=values.size(1),  # known here: asking the device would be a wait
        )
        return _SumAndSpread.apply(values, sequences, num_sequences, self.cp)  # type: ignore[no-any-return]
