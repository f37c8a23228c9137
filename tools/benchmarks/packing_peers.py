"""Plan the same lengths by the rules of NeMo-RL, verl, slime and prime-rl, packing and sharing, and by ours.

python -m tools.benchmarks.packing_peers [--sequences 10000]

The rules are written anew from what the named functions do, verl's and slime's with their balancing on. Their times
are those of the functions here, not of the peers' own code. All that look at cost take verl's, and ours does.
"""

import argparse
import heapq
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from dppo_megatron.batches import IntArray, RowPlan
from dppo_megatron.config.schema import SequencePackingConfig
from dppo_megatron.rl.bin_packing import modified_first_fit_decreasing
from dppo_megatron.rl.packing import plan_rows, report_packing
from tools.benchmarks.packing import DP_SIZES, SETTINGS, draw_lengths

Rows = list[list[int]]  # the sequences of each row
Rule = Callable[[list[int], int, int], list[Rows]]  # lengths, capacity of a row, ranks -> rows of each rank

LINEAR_COST = 24576  # of a token, a squared token of length costing 1


def cost(length: int) -> int:
    """What a sequence costs. Source: verl, verl/utils/seqlen_balancing.py, calculate_workload; slime has it too."""
    return LINEAR_COST * length + length**2


def differencing(weights: list[int], *, parts: int, equal_size: bool) -> Rows:
    """Indices in that many parts of like weight, by the largest differencing method of Karmarkar and Karp.

    equal_size: parts hold equally many, of which the number of weights must be a multiple.
    Source: verl, verl/utils/seqlen_balancing.py, karmarkar_karp; slime and prime-rl have it too.
    """
    order = sorted(range(len(weights)), key=weights.__getitem__)
    step = parts if equal_size else 1
    assert len(weights) % step == 0
    heap: list[tuple[int, int, int, list[tuple[int, list[int]]]]] = []

    def push(sets: list[tuple[int, list[int]]], number: int) -> None:
        # Sets in falling order, empty ones left out; what is spread widest is merged first.
        least = sets[-1][0] if len(sets) == parts else 0
        heapq.heappush(heap, (least - sets[0][0], -sets[0][0], number, sets))

    for start in range(0, len(order), step):
        push([(weights[item], [item]) for item in reversed(order[start : start + step])], start)
    while len(heap) > 1:
        (_, _, number, first), (*_, second) = heapq.heappop(heap), heapq.heappop(heap)
        kept = parts - len(second)
        merged = first[:kept]
        both = zip(first[kept:], reversed(second[parts - len(first) :]), strict=True)
        changed = [(one + other, items + others) for (one, items), (other, others) in both]
        for part in changed + second[: parts - len(first)]:
            insort(merged, part, key=lambda part: -part[0])
        push(merged, number)
    return [items for _, items in heap[0][3]]


def nemo_rl(lengths: list[int], capacity: int, dp_size: int) -> list[Rows]:
    """Modified first fit decreasing; then sequences become rows of their own until ranks have equally many.

    What the large sequences' rows have no room for goes, largest first, to the row with most room. Each row that is
    missing takes the last sequence of the row with most sequences; rows are dealt out in turn.
    Source: NeMo-RL, nemo_rl/data/packing/algorithms.py, ModifiedFirstFitDecreasingPacker and
    SequencePacker._adjust_bin_count; nemo_rl/distributed/batched_data_dict.py, shard_by_batch_size.
    """
    bin_of = modified_first_fit_decreasing(np.array(lengths), capacity=capacity)
    num_large = sum(2 * length > capacity for length in lengths)
    rows: Rows = [[] for _ in range(num_large)]
    emptiest: list[tuple[int, int]] = []  # tokens and number of the rows without a large sequence
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        if bin_of[item] < num_large:
            rows[bin_of[item]].append(item)
        elif emptiest and emptiest[0][0] + lengths[item] <= capacity:
            tokens, row = emptiest[0]
            rows[row].append(item)
            heapq.heapreplace(emptiest, (tokens + lengths[item], row))
        else:
            heapq.heappush(emptiest, (lengths[item], len(rows)))
            rows.append([item])
    givers = sorted(range(len(rows)), key=lambda row: (len(rows[row]), row))
    while len(rows) % dp_size:
        while len(rows[givers[-1]]) < 2:
            givers.pop()
        rows.append([rows[givers[-1]].pop()])
    return [rows[rank::dp_size] for rank in range(dp_size)]


def verl(lengths: list[int], capacity: int, dp_size: int, *, strict: bool = False) -> list[Rows]:
    """Equally many sequences of like cost to each rank; there as many rows of like cost as the fullest rank needs.

    A batch that the ranks do not divide is filled up with sequences of two tokens, which are left out of the answer.
    strict: one row more on every rank, again and again, until no row is over the cap, as since August 2026 (pull
    request 7553; that it is one at a time is assumed).
    Source: verl, verl/trainer/ppo/ray_trainer.py, _balance_batch; verl/utils/seqlen_balancing.py,
    rearrange_micro_batches; verl/trainer/ppo/padding_utils.py, upsample_batch_to_divisible_size.
    """
    filled = lengths + [2] * (-len(lengths) % dp_size)
    ranks = differencing([cost(length) for length in filled], parts=dp_size, equal_size=True)
    num_rows = max(-(-sum(filled[item] for item in rank) // capacity) for rank in ranks)
    while True:
        plan: list[Rows] = []
        for rank in ranks:
            parts = differencing([cost(filled[item]) for item in rank], parts=num_rows, equal_size=False)
            plan.append([[rank[place] for place in part] for part in parts])
            if strict and any(sum(filled[item] for item in row) > capacity for row in plan[-1]):
                break
        else:
            return [[[item for item in row if item < len(lengths)] for row in rows] for rows in plan]
        num_rows += 1


def slime(lengths: list[int], capacity: int, dp_size: int) -> list[Rows]:
    """First fit in the order of arrival; the longest rows are halved, and whole rows dealt out at like cost.

    Source: slime, slime/utils/dp_schedule.py, build_dp_schedule (balance_data on);
    slime/utils/seqlen_balancing.py, first_fit_pack and expand_bins_by_splitting.
    """
    rows = first_fit(lengths, range(len(lengths)), capacity)
    halve_heaviest(rows, lengths, dp_size)
    return deal_level(rows, lengths, dp_size)


def prime_rl(lengths: list[int], capacity: int, dp_size: int) -> list[Rows]:
    """First fit decreasing; the costliest rows are halved, and whole rows dealt out at like cost.

    A later version then exchanges whole rows between ranks; left out.
    Source: prime-rl, src/prime_rl/trainer/batch.py, packed_samples_into_micro_bs, _expand_bins_by_splitting and
    _distribute_group.
    """
    rows = first_fit(lengths, sorted(range(len(lengths)), key=lambda item: -lengths[item]), capacity)
    halve_heaviest(rows, [cost(length) for length in lengths], dp_size)
    return deal_level(rows, lengths, dp_size)


def first_fit(lengths: list[int], order: Iterable[int], capacity: int) -> Rows:
    """Each sequence into the first row with room."""
    rows: Rows = []
    room: list[int] = []
    for item in order:
        row = next((row for row, left in enumerate(room) if left >= lengths[item]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(item)
        room[row] -= lengths[item]
    return rows


def halve_heaviest(rows: Rows, weights: list[int], multiple: int) -> None:
    """Halve the heaviest row of several sequences, each in turn to the lighter half, until the count is right."""
    while len(rows) % multiple:
        heaviest = max((row for row in rows if len(row) > 1), key=lambda row: sum(weights[item] for item in row))
        halves: Rows = [[], []]
        for item in sorted(heaviest, key=lambda item: -weights[item]):
            min(halves, key=lambda half: sum(weights[item] for item in half)).append(item)
        heaviest[:], added = halves
        rows.append(added)


def deal_level(rows: Rows, lengths: list[int], dp_size: int) -> list[Rows]:
    """Equally many rows of like cost to each rank."""
    costs = [sum(cost(lengths[item]) for item in row) for row in rows]
    return [[rows[row] for row in part] for part in differencing(costs, parts=dp_size, equal_size=True)]


def ours(lengths: list[int], capacity: int, dp_size: int) -> list[Rows]:
    """The default algorithm, levelled by the same cost."""
    limits = {"capacity": capacity, "sequence_multiple": 1, "row_multiple": 1}
    weight = 1 / LINEAR_COST
    config = SequencePackingConfig()
    plan = plan_rows(
        np.array(lengths), config=config, window=None, dp_size=dp_size, attention_weight=weight, **limits
    )
    return [[row.tolist() for row in rows] for rows in plan.rows]


RULES: dict[str, Rule] = {"NeMo-RL": nemo_rl, "verl": verl, "verl, strict": partial(verl, strict=True)}
RULES |= {"slime": slime, "prime-rl": prime_rl, "ours": ours}


def cell(rule: Rule, lengths: IntArray, *, capacity: int, dp_size: int) -> str:
    """Rows (least), token and attention imbalance, rows over the cap, processor milliseconds."""
    sequences = lengths.tolist()
    start = time.process_time()
    ranks = rule(sequences, capacity, dp_size)
    milliseconds = (time.process_time() - start) * 1e3
    rows = tuple(tuple(np.array(row, np.int64) for row in rank) for rank in ranks)
    plan = RowPlan(rows, sequence_multiple=1, row_multiple=1, num_packed=sum(map(len, rows)))
    report = report_packing(plan, lengths=lengths, capacity=capacity)
    over = sum(int(lengths[row].sum()) > capacity for rank in rows for row in rank)
    least = math.ceil(int(lengths.sum()) / capacity / dp_size)
    return (
        f"{report.num_rows} ({least}), {report.token_imbalance:.3f}, {report.attention_imbalance:.3f},"
        f" {over}, {milliseconds:.0f}"
    )


def main() -> None:
    """Plan by every rule and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, default=10_000)
    arguments = parser.parse_args()
    columns = " | ".join(f"DP {size}: rows (least), tokens, attention, over, ms" for size in DP_SIZES)
    print(f"| response/row | rule | {columns} |\n|{'---|' * (2 + len(DP_SIZES))}")
    for max_response, capacity in SETTINGS:
        lengths = draw_lengths(arguments.sequences, max_response=max_response)
        for name, rule in RULES.items():
            cells = [cell(rule, lengths, capacity=capacity, dp_size=size) for size in DP_SIZES]
            print(f"| {max_response}/{capacity} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
