"""Attention over packed rows against each sequence alone, in float64 and without torch's attention."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron.batches import PackedRow, Ragged
from dppo_megatron.parallel.layer_spec import PackedAttention
from dppo_megatron.parallel.row_layout import RowLayout, padded_batches, row_layout
from dppo_megatron.parallel.sequence_layout import RowSequences, lay_out_row

HEADS, KV_HEADS, HEAD_DIM, THETA = 4, 2, 8, 1e4
ALONE = SimpleNamespace(size=1, rank=0)


def row_of(lengths: list[int], *, row_multiple: int = 1) -> PackedRow:
    """A row of sequences of one prompt token and the rest completion."""
    num = len(lengths)
    completions = Ragged.from_rows([[1] * (length - 1) for length in lengths])
    return lay_out_row(
        RowSequences(
            prompts=Ragged.from_rows([[1]] * num),
            completions=completions,
            sampled_logprobs=np.zeros(len(completions.values), np.float32),
            advantages=np.ones(num),
            coefficients=np.ones(num),
        ),
        sequence_multiple=1,
        row_multiple=row_multiple,
        cp_size=1,
        cp_rank=0,
    )


def layout_of(lengths: list[int]) -> RowLayout:
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return row_layout(row_of(lengths), frequencies=frequencies, width=HEADS * HEAD_DIM, cp=ALONE)  # type: ignore[arg-type]


def attend(tensors: list[Tensor], layout: RowLayout) -> Tensor:
    """The trainer's attention."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        kv_channels=HEAD_DIM,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    groups = SimpleNamespace(cp=None)
    attention = PackedAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)
    return attention(*tensors, None, packed_seq_params=layout)


def attend_alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One sequence by the formula: rotation as complex numbers, softmax of the causal scores."""
    length = len(query)
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = torch.arange(length, dtype=torch.float64)[:, None, None] * frequencies
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotated(heads: Tensor) -> Tensor:
        complex_heads = torch.complex(heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :]) * turn
        return torch.cat([complex_heads.real, complex_heads.imag], -1)

    query, key = rotated(query), rotated(key).repeat_interleave(HEADS // KV_HEADS, 1)
    value = value.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_DIM**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), value)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(2, 90), min_size=1, max_size=9), falling=st.booleans())
def test_outputs_and_gradients_of_a_row_are_those_of_its_sequences_alone(lengths: list[int], falling: bool) -> None:
    lengths = sorted(lengths, reverse=True) if falling else lengths
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(sum(lengths), count, HEAD_DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (HEADS, KV_HEADS, KV_HEADS)
    ]
    slopes = torch.randn(sum(lengths), HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)

    out = attend(tensors, layout_of(lengths))
    gradients = torch.autograd.grad((out * slopes).sum(), tensors)
    alone = torch.cat([attend_alone(*parts) for parts in zip(*(one.split(lengths) for one in tensors), strict=True)])
    expected = torch.autograd.grad((alone * slopes).sum(), tensors)

    # The angles are float32 in the trainer, as in the sampler.
    for ours, theirs in zip((out, *gradients), (alone, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_equal_sequences_attend_in_one_call_without_copies() -> None:
    (batch,) = padded_batches(np.full(16, 50), width=32, cp_size=1, cp_rank=0)
    assert batch.queries.shape == (16, 50)
    tokens = torch.zeros(800, 4)
    assert batch.queries.pad(tokens).data_ptr() == tokens.data_ptr()


def test_long_unlike_sequences_attend_without_padding_and_short_ones_together() -> None:
    lengths = np.array([900, 500, 300, 12, 9, 7, 5, 3, 2])
    shapes = [one.queries.shape for one in padded_batches(lengths, width=512, cp_size=1, cp_rank=0)]
    assert shapes == [(1, 900), (1, 500), (1, 300), (1, 12), (5, 9)]


@pytest.mark.parametrize(("lengths", "row_multiple", "num_padded"), [([5, 9], 16, 2), ([8, 8], 16, 0), ([], 16, 16)])
def test_the_padding_of_a_row_is_a_sequence_that_trains_nothing(
    lengths: list[int], row_multiple: int, num_padded: int
) -> None:
    row = row_of(lengths, row_multiple=row_multiple)
    assert row.num_sequences == len(lengths)
    assert row.sequence_lengths.tolist() == lengths + [num_padded] * bool(num_padded)
    assert len(row.token_ids) == sum(lengths) + num_padded
    assert row.cu_seqlens.tolist() == [0, *np.cumsum(row.sequence_lengths).tolist()]
    assert int((row.coefficients != 0).sum()) == sum(length - 1 for length in lengths)
    assert not row.coefficients[sum(lengths) :].any()
