"""Equal shares: bins of sequences to the same number of rows on every data-parallel rank, at level cost.

Dealing out finished bins is not enough where a rank has few of them: sequences also move between bins of
different ranks. Only sums of integers and element-wise arithmetic decide, so that all ranks plan the same.
"""

from dataclasses import dataclass

import numpy as np

from dppo_megatron.batches import FloatArray, IntArray, RowPlan
from dppo_megatron.rl.bins import Bins

# Ranks are level where none is above the mean by more than this share of it. Attention is weighted less than
# cost, so that the same bound lets it stray further.
_LEVEL = 0.002
_ATTENTION_SHARE = 0.4
_MAX_ROUNDS = 48
# Sequences of a rank looked at in one exchange: all pairs of two ranks are compared.
_MAX_CANDIDATES = 128


@dataclass(slots=True)
class _Table:
    """The plan while it is worked on; K sequences, B bins.

    padded: [K], tokens. bin_of: [K]. sequence_rank: [K]. rank_of: [B], rank of each bin.
    room: [B], tokens left in each bin. measures: float64 [2, K], what each sequence adds to its rank's cost
    and to its squared lengths, in shares of the mean rank. loads: float64 [2, DP], their sums over a rank.
    """

    padded: IntArray
    bin_of: IntArray
    sequence_rank: IntArray
    rank_of: IntArray
    room: IntArray
    measures: FloatArray
    loads: FloatArray


def rows_each(num_bins: int, *, dp_size: int, num_rows_multiple: int) -> int:
    """Rows that each rank needs for that many bins, at least one and a multiple of ``num_rows_multiple``."""
    assert dp_size >= 1
    assert num_rows_multiple >= 1
    return max(-(-num_bins // (dp_size * num_rows_multiple)), 1) * num_rows_multiple


def share(bins: Bins, *, dp_size: int, num_rows_multiple: int = 1, attention_weight: float = 0.0) -> RowPlan:
    """Spread bins over ranks: the same number of rows each, the least that holds them, at level cost.

    num_rows_multiple: what that number is a multiple of. attention_weight: cost of a squared token of length,
    a token costing 1. A rank's rows stand in falling cost, so that rows that run together are alike; a row's
    sequences in falling length, so that attention finds like ones side by side.
    """
    assert attention_weight >= 0
    num_rows = rows_each(bins.num_bins, dp_size=dp_size, num_rows_multiple=num_rows_multiple)
    num_bins = num_rows * dp_size
    padded = bins.padded_lengths
    squares = padded.astype(np.float64) ** 2
    cost = padded + attention_weight * squares
    bin_of, rank_of = bins.bin_of, np.zeros(num_bins, np.int64)
    if dp_size > 1 and len(padded):
        table = _deal(bins, cost=cost, squares=squares, num_bins=num_bins, dp_size=dp_size)
        _level(table)
        bin_of, rank_of = table.bin_of, table.rank_of
    order = np.lexsort((-_sums(cost, bin_of, num_bins), rank_of))
    ends = np.cumsum(np.bincount(bin_of, minlength=num_bins))
    members = np.split(np.lexsort((-padded, bin_of)), ends[:-1])
    rows = [members[row] for row in order]
    return RowPlan(
        rows=tuple(tuple(rows[rank * num_rows : (rank + 1) * num_rows]) for rank in range(dp_size)),
        sequence_multiple=bins.limits.sequence_multiple,
        row_multiple=bins.limits.row_multiple,
        num_packed=bins.num_bins,
    )


def _deal(bins: Bins, *, cost: FloatArray, squares: FloatArray, num_bins: int, dp_size: int) -> _Table:
    """Deal whole bins in turns of one a rank: bins of like attention, the costliest to the lightest rank."""
    # cumsum adds in order; sum would group the terms by the width of the processor's vectors.
    total_cost, total_squares = cost.cumsum()[-1], squares.cumsum()[-1]
    measures = np.stack([cost / total_cost, _ATTENTION_SHARE * squares / total_squares]) * dp_size
    bin_measures = np.stack([_sums(measure, bins.bin_of, num_bins) for measure in measures])
    weights = bin_measures[0] + bin_measures[1]
    rank_of = np.empty(num_bins, np.int64)
    sums = np.zeros(dp_size)
    for alike in np.argsort(-bin_measures[1], kind="stable").reshape(-1, dp_size):
        turn = alike[np.argsort(-weights[alike], kind="stable")]
        ranks = np.argsort(sums, kind="stable")
        rank_of[turn] = ranks
        sums[ranks] += weights[turn]
    padded = bins.padded_lengths
    return _Table(
        padded=padded,
        bin_of=bins.bin_of.copy(),
        sequence_rank=rank_of[bins.bin_of],
        rank_of=rank_of,
        room=bins.limits.room - np.bincount(bins.bin_of, padded, num_bins).astype(np.int64),
        measures=measures,
        loads=np.stack([_sums(measure, rank_of, dp_size) for measure in bin_measures]),
    )


def _level(table: _Table) -> None:
    """Exchange sequences between heavy and light ranks until they are level or nothing helps."""
    num_pairs = table.loads.shape[1] // 2
    idle = 0
    for turn in range(_MAX_ROUNDS):
        measure = table.loads[turn % 2]
        order = np.argsort(-measure, kind="stable")
        # Pairs that no exchange helps would meet again and again: after a while others meet.
        partners = np.roll(order[::-1][:num_pairs], turn // 4)
        improved = False
        for heavy, light in zip(order[:num_pairs].tolist(), partners.tolist(), strict=True):
            if measure[heavy] - measure[light] > _LEVEL:
                improved |= _exchange(table, heavy=heavy, light=light, turn=turn)
        idle = 0 if improved else idle + 1
        if idle == len(table.loads):
            return


def _exchange(table: _Table, *, heavy: int, light: int, turn: int) -> bool:
    """Make the one exchange (or move) of sequences that levels two ranks best; False where none does."""
    given, given_bins = _candidates(table, rank=heavy, turn=turn)
    taken, taken_bins = _candidates(table, rank=light, turn=turn)
    given_size, taken_size = table.padded[given], table.padded[taken]
    given_size[-1] = taken_size[-1] = 0
    shift = given_size[:, None] - taken_size
    fits = (shift <= table.room[taken_bins]) & (-shift <= table.room[given_bins][:, None])
    # Moving half of the difference would level the two.
    target = (table.loads[:, heavy] - table.loads[:, light]) / 2
    given_measure, taken_measure = table.measures[:, given], table.measures[:, taken]
    given_measure[:, -1] = taken_measure[:, -1] = 0
    moved = given_measure[:, :, None] - taken_measure[:, None, :]
    off = moved - target[:, None, None]
    distance = np.where(fits, off[0] ** 2 + off[1] ** 2, np.inf)
    best = int(distance.argmin())
    if distance.flat[best] > 0.98 * (target[0] ** 2 + target[1] ** 2):
        return False
    i, j = divmod(best, len(taken))
    table.loads[:, heavy] -= moved[:, i, j]
    table.loads[:, light] += moved[:, i, j]
    table.room[given_bins[i]] += shift[i, j]
    table.room[taken_bins[j]] -= shift[i, j]
    if i < len(given) - 1:
        table.bin_of[given[i]], table.sequence_rank[given[i]] = taken_bins[j], light
    if j < len(taken) - 1:
        table.bin_of[taken[j]], table.sequence_rank[taken[j]] = given_bins[i], heavy
    return True


def _candidates(table: _Table, *, rank: int, turn: int) -> tuple[IntArray, IntArray]:
    """Sequences of a rank and their bins; the last stands for no sequence, in the roomiest bin."""
    sequences = np.flatnonzero(table.sequence_rank == rank)
    step = -(-len(sequences) // _MAX_CANDIDATES) or 1
    sequences = sequences[turn % step :: step]
    own_bins = np.flatnonzero(table.rank_of == rank)
    roomiest = own_bins[table.room[own_bins].argmax()]
    return np.append(sequences, 0), np.append(table.bin_of[sequences], roomiest)


def _sums(values: FloatArray, groups: IntArray, num_groups: int) -> FloatArray:
    return np.bincount(groups, values, num_groups).astype(np.float64)
