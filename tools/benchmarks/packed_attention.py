"""Measure attention over a packed row against its sequences one by one, forward and backward, on the CPU.

python -m tools.benchmarks.packed_attention [--repeats 41] [--json]
"""

import argparse
import json
from dataclasses import asdict, dataclass
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron.architecture import Architecture
from dppo_megatron.batches import IntArray, PackedRow
from dppo_megatron.parallel.layer_spec import PackedAttention
from dppo_megatron.parallel.rotary import rotary_frequencies
from dppo_megatron.parallel.row_layout import RowLayout, row_layout
from tools.benchmarks.timing import interleaved_medians

MODELS = {"quickstart": (4, 2, 16), "30M": (8, 2, 64)}  # query heads, key-value heads, head size
SPREADS = ("even", "spread", "one long")


@dataclass(frozen=True, slots=True)
class Timing:
    """Processor milliseconds of one layer's attention, medians; ratio: the row's over one by one."""

    model: str
    spread: str
    num_sequences: int
    num_tokens: int
    calls: int
    row_ms: float
    one_by_one_ms: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Alone:
    """One axis of a mesh of one process."""

    size: int = 1
    rank: int = 0


def draw_lengths(num_sequences: int, *, spread: str) -> IntArray:
    """Falling lengths of some 1024 tokens together: all equal, lognormal, or one of half the row."""
    mean = 1024 // num_sequences
    if spread == "even":
        return np.full(num_sequences, mean)
    drawn = np.random.default_rng(0).lognormal(0, 0.7, num_sequences)
    if spread == "one long":
        drawn[0] = drawn.sum()
    return np.sort((1024 * drawn / drawn.sum()).astype(np.int64).clip(2))[::-1].copy()


def layout_of(lengths: IntArray, architecture: Architecture) -> RowLayout:
    """The layout of a row that holds nothing but lengths."""
    num_tokens, bounds = int(lengths.sum()), np.concatenate([[0], lengths.cumsum()])
    integers = torch.zeros(num_tokens, dtype=torch.int64)
    floats = torch.zeros(num_tokens)
    row = PackedRow(
        token_ids=integers,
        labels=integers,
        positions=torch.from_numpy(np.arange(num_tokens) - np.repeat(bounds[:-1], lengths)),
        coefficients=floats,
        advantages=floats,
        sampled_logprobs=floats,
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        sequence_lengths=lengths,
        num_sequences=len(lengths),
    )
    return row_layout(
        row,
        frequencies=rotary_frequencies(architecture),
        width=architecture.num_attention_heads * architecture.head_dim,
        cp=Alone(),  # type: ignore[arg-type]
    )


def architecture_of(model: str) -> Architecture:
    """Attention's sizes of a model; the rest is not used."""
    heads, kv_heads, head_dim = MODELS[model]
    return Architecture(
        num_layers=1,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=1,
        vocab_size=1,
        tied=True,
        rope_theta=1e4,
        norm_epsilon=1e-6,
        max_positions=2048,
        qk_norm=True,
    )


def attention_of(architecture: Architecture) -> PackedAttention:
    """The trainer's attention, alone."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    return PackedAttention(config, 1, AttnMaskType.causal, "self", pg_collection=SimpleNamespace(cp=None))


def draw_heads(num_tokens: int, architecture: Architecture) -> list[Tensor]:
    """Random query, key and value [T, heads, d] that want gradients."""
    counts = (architecture.num_attention_heads, *[architecture.num_key_value_heads] * 2)
    return [torch.randn(num_tokens, count, architecture.head_dim, requires_grad=True) for count in counts]


def measure(model: str, *, spread: str, num_sequences: int, repeats: int) -> Timing:
    """Time one row of sequences both ways."""
    architecture, lengths = architecture_of(model), draw_lengths(num_sequences, spread=spread)
    attention, whole = attention_of(architecture), layout_of(lengths, architecture)
    heads = draw_heads(int(lengths.sum()), architecture)
    alone = [layout_of(lengths[[index]], architecture) for index in range(num_sequences)]
    parts = [draw_heads(int(length), architecture) for length in lengths]

    def run(tensors: list[Tensor], layout: RowLayout) -> None:
        query, key, value = tensors
        out = attention(query, key, value, None, packed_seq_params=layout)
        out.backward(torch.ones_like(out))

    def one_by_one() -> None:
        for tensors, layout in zip(parts, alone, strict=True):
            run(tensors, layout)

    row_ms, parts_ms = (
        1e3 * value for value in interleaved_medians([lambda: run(heads, whole), one_by_one], turns=repeats)
    )
    return Timing(
        model=model,
        spread=spread,
        num_sequences=num_sequences,
        num_tokens=int(lengths.sum()),
        calls=len(whole.batches),
        row_ms=row_ms,
        one_by_one_ms=parts_ms,
        ratio=row_ms / parts_ms,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    timings = [
        measure(model, spread=spread, num_sequences=num_sequences, repeats=arguments.repeats)
        for model in MODELS
        for spread in SPREADS
        for num_sequences in (1, 8, 64)
    ]
    if arguments.json:
        print(json.dumps([asdict(timing) for timing in timings], indent=1))
        return
    print("| model | lengths | sequences | tokens | calls | row ms | one by one ms | row / one by one |")
    print("|---|---|---|---|---|---|---|---|")
    for one in timings:
        print(
            f"| {one.model} | {one.spread} | {one.num_sequences} | {one.num_tokens} | {one.calls} |"
            f" {one.row_ms:.2f} | {one.one_by_one_ms:.2f} | {one.ratio:.2f} |"
        )


if __name__ == "__main__":
    main()
