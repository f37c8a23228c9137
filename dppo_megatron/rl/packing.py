"""Dense packing: sequences of uneven lengths into THD rows of at most a capacity of padded tokens.

    share(pack(lengths, ...), dp_size=...) -> RowPlan

Every function is pure and deterministic, so that each rank plans alone and all plans are equal.
"""

from dataclasses import dataclass

import numpy as np

from dppo_megatron.batches import IntArray, RowPlan
from dppo_megatron.config.schema import SequencePackingConfig
from dppo_megatron.rl import bin_packing
from dppo_megatron.rl.bins import Bins, RowLimits
from dppo_megatron.rl.sharing import rows_each, share


@dataclass(frozen=True, slots=True)
class PackingReport:
    """How dense and how even a plan is, for the step's log.

    num_rows: rows of each data-parallel rank. tokens, sequence_padding, row_padding: tokens of all rows.
    density: tokens over tokens and padding. fill: tokens over rows times capacity. packed_fill: the same before
    sharing, which adds rows until all ranks have equally many.
    token_imbalance, attention_imbalance: most over mean of the ranks' padded tokens and of their sum of
    squared padded lengths; 1 is level.
    """

    num_rows: int
    tokens: int
    sequence_padding: int
    row_padding: int
    density: float
    fill: float
    packed_fill: float
    token_imbalance: float
    attention_imbalance: float


# Where these take more bins than are enough, pairing is tried for fewer.
_DECREASING = ("best_fit_decreasing", "first_fit_decreasing", "modified_first_fit_decreasing")
_ALGORITHMS = {
    "best_fit_decreasing": bin_packing.best_fit_decreasing,
    "first_fit_decreasing": bin_packing.first_fit_decreasing,
    "modified_first_fit_decreasing": bin_packing.modified_first_fit_decreasing,
    "first_fit_shuffle": bin_packing.first_fit_shuffle,
    "concatenative": bin_packing.concatenative,
}


def plan_rows(
    lengths: IntArray,
    *,
    config: SequencePackingConfig,
    window: int | None,
    capacity: int,
    sequence_multiple: int,
    row_multiple: int,
    dp_size: int,
    num_rows_multiple: int = 1,
    attention_weight: float = 0.0,
) -> RowPlan:
    """Pack sequences of the given unpadded lengths [K] into rows, equally many on every rank.

    window: sequences that the paper's rule looks at, whatever the algorithm; None packs by the algorithm.
    capacity: padded tokens a row. num_rows_multiple: what the rows of a rank are a multiple of.
    attention_weight: cost of a squared token of length, a token costing 1.
    Raises: ValueError as ``pack`` does.
    Source: DPPO, dense prompt packing.
    """
    limits = RowLimits(capacity, sequence_multiple, row_multiple)
    least = -(-int(limits.pad_sequences(lengths).sum()) // limits.room)
    num_rows = rows_each(least, dp_size=dp_size, num_rows_multiple=num_rows_multiple)
    # As many bins as there will be rows anyway cost nothing, and bins with room are easier to level.
    bins = pack(lengths, config=config, window=window, limits=limits, enough=num_rows * dp_size)
    return share(bins, dp_size=dp_size, num_rows_multiple=num_rows_multiple, attention_weight=attention_weight)


def pack(
    lengths: IntArray, *, config: SequencePackingConfig, window: int | None, limits: RowLimits, enough: int = 0
) -> Bins:
    """Put sequences of the given unpadded lengths [K] into bins by ``config.algorithm``.

    window: sequences that the paper's rule looks at, whatever the algorithm; None packs by the algorithm. The
    decreasing algorithms give way to ``paired_decreasing`` where that takes fewer bins and they more than ``enough``.
    Raises: ValueError for a sequence that no row can hold, or a window below 1.
    """
    if window is not None and window < 1:
        raise ValueError(f"dppo.packing.window: {window}; allowed: null, or 1 and more")
    lengths = np.asarray(lengths, np.int64)
    assert (lengths > 0).all(), "a sequence has at least one token"
    padded = limits.pad_sequences(lengths)
    if len(padded) and padded.max() > limits.room:
        raise ValueError(
            f"policy.max_total_sequence_length: a sequence of {lengths.max()} tokens"
            f" ({padded.max()} padded) is longer than a row of"
            f" policy.sequence_packing.train_mb_tokens: {limits.capacity};"
            f" allowed: {limits.room} padded tokens and less"
        )
    sizes, capacity = limits.in_units(padded)
    if window is not None or config.algorithm == "window_greedy":
        bin_of = bin_packing.window_greedy(sizes, capacity=capacity, window=window or max(len(sizes), 1))
    else:
        bin_of = _ALGORITHMS[config.algorithm](sizes, capacity=capacity)
        enough = max(enough, -(-int(sizes.sum()) // capacity))
        if config.algorithm in _DECREASING and max(bin_of, default=-1) + 1 > enough:
            bin_of = min(bin_of, bin_packing.paired_decreasing(sizes, capacity=capacity), key=max)
    return Bins.from_list(lengths, bin_of, limits)


def report_packing(plan: RowPlan, *, lengths: IntArray, capacity: int) -> PackingReport:
    """Measure a plan for sequences of the given unpadded lengths [K]."""
    limits = RowLimits(capacity, plan.sequence_multiple, plan.row_multiple)
    padded = limits.pad_sequences(lengths)
    row_tokens = np.array([[padded[row].sum() for row in rows] for rows in plan.rows], np.int64)
    squares = np.array([sum(int((padded[row] ** 2).sum()) for row in rows) for rows in plan.rows])
    padded_rows = limits.pad_rows(row_tokens)
    tokens, total = int(lengths.sum()), int(padded_rows.sum())
    return PackingReport(
        num_rows=plan.num_rows,
        tokens=tokens,
        sequence_padding=int(padded.sum()) - tokens,
        row_padding=total - int(padded.sum()),
        density=tokens / total,
        fill=tokens / (padded_rows.size * capacity),
        packed_fill=tokens / (max(plan.num_packed, 1) * capacity),
        token_imbalance=_most_over_mean(padded_rows.sum(axis=1)),
        attention_imbalance=_most_over_mean(squares),
    )


def _most_over_mean(loads: IntArray) -> float:
    return float(loads.max() / loads.mean()) if loads.any() else 1.0
