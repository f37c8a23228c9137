"""Measure dense packing and equal shares: density, balance and processor time, for every algorithm.

python tools/benchmarks/packing.py [--sequences 1000 10000 100000] [--algorithms NAME ...] [--json]
    [--picture packing.svg]
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar, get_args, get_type_hints

import numpy as np

from dppo_megatron.batches import IntArray
from dppo_megatron.config.schema import SequencePackingConfig
from dppo_megatron.rl.bins import Bins, RowLimits
from dppo_megatron.rl.packing import pack, plan_rows, report_packing
from dppo_megatron.rl.sharing import share

T = TypeVar("T")

ALGORITHMS = get_args(get_type_hints(SequencePackingConfig)["algorithm"])
SETTINGS = ((1024, 2048), (4096, 6144), (16384, 20480))  # longest response, capacity of a row
WINDOWS = (32, 512)
DP_SIZES = (1, 8, 64)


@dataclass(frozen=True, slots=True)
class Share:
    """One plan: rows of a rank, the least that the tokens allow, balance; seconds in all and of sharing alone."""

    dp_size: int
    num_rows: int
    least_rows: int
    token_imbalance: float
    attention_imbalance: float
    plan_seconds: float
    share_seconds: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One packing, and its shares. density: tokens over bins times capacity, before sharing."""

    algorithm: str
    num_sequences: int
    max_response: int
    capacity: int
    padded_density: float
    density: float
    seconds: float
    shares: tuple[Share, ...]


def draw_lengths(num_sequences: int, *, max_response: int, group_size: int = 8) -> IntArray:
    """Lengths of prompts with responses as in GRPO: prompts of some 110 tokens, responses spread by prompt.

    The prompt is lognormal (median 110, spread 0.5) in 30 .. 512; a response is lognormal about its
    prompt's median, which is lognormal about a quarter of the longest response, in 16 .. max_response.
    """
    rng = np.random.default_rng(0)
    num_prompts = max(1, num_sequences // group_size)
    prompts = rng.lognormal(math.log(110), 0.5, num_prompts).clip(30, 512).astype(np.int64)
    medians = rng.normal(math.log(max_response / 4), 0.5, num_prompts)
    spread = rng.normal(0, 0.5, (num_prompts, group_size))
    responses = np.exp(medians[:, None] + spread).clip(16, max_response).astype(np.int64)
    return (prompts[:, None] + responses).ravel()[:num_sequences]


def best_of_three(action: Callable[[], T]) -> tuple[T, float]:
    """The result, and the processor seconds of the fastest of three calls."""
    calls = []
    for _ in range(3):
        start = time.process_time()
        result = action()
        calls.append((time.process_time() - start, result))
    return calls[-1][1], min(seconds for seconds, _ in calls)


def measure(lengths: IntArray, *, algorithm: str, window: int | None, setting: tuple[int, int]) -> Figure:
    """Pack one set of lengths, and plan it for every number of ranks."""
    max_response, capacity = setting
    config = SequencePackingConfig(algorithm=algorithm)  # pyright: ignore[reportArgumentType]
    limits = RowLimits(capacity, sequence_multiple=1, row_multiple=1)
    bins, seconds = best_of_three(lambda: pack(lengths, config=config, window=window, limits=limits))
    return Figure(
        algorithm=algorithm if window is None else f"{algorithm} {window}",
        num_sequences=len(lengths),
        max_response=max_response,
        capacity=capacity,
        padded_density=float(lengths.mean() / lengths.max()),
        density=float(lengths.sum() / bins.num_bins / capacity),
        seconds=seconds,
        shares=tuple(
            measure_share(lengths, config=config, window=window, bins=bins, dp_size=size) for size in DP_SIZES
        ),
    )


def measure_share(
    lengths: IntArray, *, config: SequencePackingConfig, window: int | None, bins: Bins, dp_size: int
) -> Share:
    """Plan for one number of ranks."""
    capacity = bins.limits.capacity
    plan, seconds = best_of_three(
        lambda: plan_rows(
            lengths,
            config=config,
            window=window,
            capacity=capacity,
            sequence_multiple=1,
            row_multiple=1,
            dp_size=dp_size,
        )
    )
    report = report_packing(plan, lengths=lengths, capacity=capacity)
    return Share(
        dp_size=dp_size,
        num_rows=report.num_rows,
        least_rows=math.ceil(int(lengths.sum()) / capacity / dp_size),
        token_imbalance=report.token_imbalance,
        attention_imbalance=report.attention_imbalance,
        plan_seconds=seconds,
        share_seconds=best_of_three(lambda: share(bins, dp_size=dp_size))[1],
    )


def print_table(figures: list[Figure]) -> None:
    """Print the figures as a Markdown table."""
    shares = " | ".join(f"DP {size}: rows (least), tokens, attention, ms (sharing)" for size in DP_SIZES)
    print(f"| sequences | response/row | algorithm | density | ms | {shares} |")
    print("|" + "---|" * (5 + len(DP_SIZES)))
    for figure in figures:
        cells = [
            f"{one.num_rows} ({one.least_rows}), {one.token_imbalance:.3f}, {one.attention_imbalance:.3f},"
            f" {one.plan_seconds * 1e3:.0f} ({one.share_seconds * 1e3:.0f})"
            for one in figure.shares
        ]
        print(
            f"| {figure.num_sequences} | {figure.max_response}/{figure.capacity} | {figure.algorithm}"
            f" | {figure.density:.4f} | {figure.seconds * 1e3:.0f} | {' | '.join(cells)} |"
        )


def draw_picture(figures: list[Figure]) -> str:
    """Bars of density by algorithm for each length setting, as SVG."""
    width, line = 300, 18
    parts = []
    y = 0
    for figure in figures:
        y += line
        x = 250
        label = f"{figure.algorithm}, {figure.max_response}/{figure.capacity}"
        bar = round(width * figure.density)
        parts.append(f'<text x="{x - 8}" y="{y + 12}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="14" fill="#e4e4e4"/>')
        parts.append(f'<rect x="{x}" y="{y}" width="{bar}" height="14" fill="#4878a8"/>')
        parts.append(f'<text x="{x + width + 8}" y="{y + 12}">{figure.density:.4f}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{y + 2 * line}"'
        f' font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=ALGORITHMS, metavar="NAME", help="all")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--picture", type=Path, help="write the densities as SVG")
    arguments = parser.parse_args()
    packings = [(algorithm, None) for algorithm in arguments.algorithms]
    if "window_greedy" in arguments.algorithms:
        packings += [("window_greedy", window) for window in WINDOWS]
    figures = [
        measure(
            draw_lengths(num_sequences, max_response=setting[0]),
            algorithm=algorithm,
            window=window,
            setting=setting,
        )
        for num_sequences in arguments.sequences
        for setting in SETTINGS
        for algorithm, window in packings
    ]
    if arguments.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=1))
    else:
        print_table(figures)
    if arguments.picture:
        arguments.picture.write_text(draw_picture(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
