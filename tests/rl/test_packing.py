import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.batches import IntArray, RowPlan
from dppo_megatron.config.schema import SequencePackingConfig
from dppo_megatron.rl import bin_packing
from dppo_megatron.rl.bins import RowLimits
from dppo_megatron.rl.draws import hash_parts
from dppo_megatron.rl.packing import plan_rows, report_packing

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "benchmarks" / "packing.py"))
ALGORITHMS = BENCHMARK["ALGORITHMS"]
DECREASING = ("best_fit_decreasing", "first_fit_decreasing", "modified_first_fit_decreasing")
# Longest response, capacity of a row.
SETTINGS = ((1024, 2048), (4096, 6144), (16384, 20480))


def config_of(algorithm: str) -> SequencePackingConfig:
    return SequencePackingConfig(algorithm=algorithm)  # pyright: ignore[reportArgumentType]


def plan_of(
    lengths: list[int] | IntArray,
    *,
    algorithm: str = "modified_first_fit_decreasing",
    window: int | None = None,
    capacity: int = 100,
    sequence_multiple: int = 1,
    row_multiple: int = 1,
    dp_size: int = 1,
    num_rows_multiple: int = 1,
    attention_weight: float = 0.0,
) -> RowPlan:
    return plan_rows(
        np.array(lengths, np.int64),
        config=config_of(algorithm),
        window=window,
        capacity=capacity,
        sequence_multiple=sequence_multiple,
        row_multiple=row_multiple,
        dp_size=dp_size,
        num_rows_multiple=num_rows_multiple,
        attention_weight=attention_weight,
    )


def as_lists(plan: RowPlan) -> list[list[list[int]]]:
    return [[row.tolist() for row in rows] for rows in plan.rows]


def check_invariants(
    plan: RowPlan, lengths: list[int], *, capacity: int, dp_size: int, num_rows_multiple: int = 1
) -> None:
    rows = [row for rank in as_lists(plan) for row in rank]
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        tokens = sum(-(-lengths[index] // plan.sequence_multiple) * plan.sequence_multiple for index in row)
        assert -(-tokens // plan.row_multiple) * plan.row_multiple <= capacity
    assert len(plan.rows) == dp_size
    assert {len(rank) for rank in plan.rows} == {plan.num_rows}
    assert plan.num_rows % num_rows_multiple == 0


def adversarial_lengths(longest: int) -> st.SearchStrategy[list[int]]:
    """Any lengths; one length for all, ones and the longest among them; one huge; about halves of the longest."""
    counts, half = st.integers(0, 40), longest // 2
    one_length = st.sampled_from([1, longest]) | st.integers(1, longest)
    return st.one_of(
        st.lists(st.integers(1, longest), max_size=40),
        st.builds(lambda length, count: [length] * count, one_length, counts),
        st.builds(lambda count, place: [1] * min(place, count) + [longest] + [1] * count, counts, counts),
        st.lists(st.integers(max(half - 1, 1), half + 1), max_size=40),
    )


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_plan_keeps_the_invariants(data: st.DataObject) -> None:
    sequence_multiple = data.draw(st.sampled_from([1, 2, 8]))
    row_multiple = data.draw(st.sampled_from([1, 16, 24]))
    dp_size, num_rows_multiple = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    capacity = data.draw(st.integers(24, 120))
    longest = RowLimits(capacity, sequence_multiple, row_multiple).room
    lengths = data.draw(adversarial_lengths(longest))
    algorithm = data.draw(st.sampled_from(ALGORITHMS))
    window = data.draw(st.none() | st.integers(1, 50))
    weight = data.draw(st.sampled_from([0.0, 0.01, 10.0]))

    plan = plan_of(
        lengths,
        algorithm=algorithm,
        window=window,
        capacity=capacity,
        sequence_multiple=sequence_multiple,
        row_multiple=row_multiple,
        dp_size=dp_size,
        num_rows_multiple=num_rows_multiple,
        attention_weight=weight,
    )

    check_invariants(plan, lengths, capacity=capacity, dp_size=dp_size, num_rows_multiple=num_rows_multiple)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "lengths",
    [[], [7], [100], [100] * 9, [1] * 305, [50] * 21, [51] * 5, [100, 1, 1], [99, 1] * 6, [34] * 10],
    ids=str,
)
def test_adversarial_lengths_take_the_fewest_rows(lengths: list[int], algorithm: str) -> None:
    # Their optimum is known: items of one size, or pairs that stand next to each other.
    fewest = {(51,) * 5: 5, (34,) * 10: 5}.get(tuple(lengths), -(-sum(lengths) // 100))

    for dp_size in (1, 3, 8):
        plan = plan_of(lengths, algorithm=algorithm, dp_size=dp_size)
        check_invariants(plan, lengths, capacity=100, dp_size=dp_size)
        spare = algorithm in ("first_fit_shuffle", "concatenative")
        assert max(-(-fewest // dp_size), 1) <= plan.num_rows <= max(-(-(fewest + spare) // dp_size), 1)


def test_no_sequences_give_every_rank_its_empty_rows() -> None:
    assert as_lists(plan_of([], dp_size=3)) == [[[]]] * 3
    assert as_lists(plan_of([], dp_size=2, num_rows_multiple=4)) == [[[]] * 4] * 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_plan_depends_on_its_inputs_alone(algorithm: str) -> None:
    lengths = BENCHMARK["draw_lengths"](300, max_response=1024)
    plans = []
    for seed in (1, 2):
        np.random.seed(seed)
        plans.append(as_lists(plan_of(lengths.copy(), algorithm=algorithm, capacity=2048, dp_size=4)))

    assert plans[0] == plans[1]


def naive_window_greedy(sizes: list[int], capacity: int, window: int) -> list[int]:
    waiting, bin_of, chosen = list(range(len(sizes))), [0] * len(sizes), -1
    while waiting:
        chosen += 1
        oldest = waiting.pop(0)
        bin_of[oldest] = chosen
        room = capacity - sizes[oldest]
        while fitting := [item for item in waiting[:window] if sizes[item] <= room]:
            item = max(fitting, key=lambda one: (sizes[one], -one))
            waiting.remove(item)
            bin_of[item] = chosen
            room -= sizes[item]
    return bin_of


def naive_fit(sizes: list[int], capacity: int, order: list[int], *, best: bool) -> list[int]:
    rooms, bin_of = [], [0] * len(sizes)
    for item in order:
        open_bins = [one for one, room in enumerate(rooms) if room >= sizes[item]]
        if not open_bins:
            rooms.append(capacity)
            open_bins = [len(rooms) - 1]
        chosen = min(open_bins, key=lambda one: rooms[one]) if best else open_bins[0]
        bin_of[item] = chosen
        rooms[chosen] -= sizes[item]
    return bin_of


def rooms_left(sizes: list[int], bin_of: list[int]) -> list[int]:
    return sorted(np.bincount(bin_of, sizes).tolist())


SIZES = st.lists(st.integers(1, 40), max_size=60)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, window=st.integers(1, 70))
def test_window_greedy_is_the_rule_of_the_paper(sizes: list[int], window: int) -> None:
    bin_of = bin_packing.window_greedy(np.array(sizes, np.int64), capacity=40, window=window)

    assert bin_of == naive_window_greedy(sizes, 40, window)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES)
def test_the_fit_algorithms_are_those_of_their_names(sizes: list[int]) -> None:
    array = np.array(sizes, np.int64)
    falling = sorted(range(len(sizes)), key=lambda item: -sizes[item])
    drawn = np.argsort(hash_parts(len(sizes), np.arange(len(sizes))), kind="stable").tolist()

    first = bin_packing.first_fit_decreasing(array, capacity=40)
    best = bin_packing.best_fit_decreasing(array, capacity=40)
    shuffled = bin_packing.first_fit_shuffle(array, capacity=40)

    assert first == naive_fit(sizes, 40, falling, best=False)
    assert shuffled == naive_fit(sizes, 40, drawn, best=False)
    # Equally full bins are interchangeable.
    assert rooms_left(sizes, best) == rooms_left(sizes, naive_fit(sizes, 40, falling, best=True))


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES)
def test_bins_are_numbered_without_gaps_and_within_capacity(sizes: list[int]) -> None:
    for name in ("modified_first_fit_decreasing", "paired_decreasing", "concatenative"):
        bin_of = getattr(bin_packing, name)(np.array(sizes, np.int64), capacity=40)
        assert sorted(set(bin_of)) == list(range(max(bin_of, default=-1) + 1))
        assert max(rooms_left(sizes, bin_of), default=0) <= 40


def test_modified_first_fit_decreasing_saves_a_bin_on_the_worst_case_of_first_fit_decreasing() -> None:
    # Johnson's instance: the optimum is 9 bins.
    sizes = np.array([51] * 6 + [27] * 6 + [26] * 6 + [23] * 12)

    assert max(bin_packing.first_fit_decreasing(sizes, capacity=100)) + 1 == 11
    assert max(bin_packing.modified_first_fit_decreasing(sizes, capacity=100)) + 1 == 10


def test_pairs_close_bins_that_first_fit_decreasing_leaves_open() -> None:
    # First fit takes 50 + 40 and 40 + 30 + 20.
    sizes = np.array([50, 40, 40, 30, 20, 20])

    assert max(bin_packing.first_fit_decreasing(sizes, capacity=100)) + 1 == 3
    assert bin_packing.paired_decreasing(sizes, capacity=100) == [0, 1, 1, 0, 0, 1]


def test_pairs_are_as_even_as_can_be() -> None:
    # 50 + 27 + 23 rather than 50 + 49 + 1: the small item waits.
    assert bin_packing.paired_decreasing(np.array([50, 49, 27, 23, 1]), capacity=100) == [0, 1, 0, 0, 1]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_full_bins_cut_to_pieces_come_back_in_few(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(10, 120))
    bins = data.draw(st.lists(st.lists(st.integers(1, capacity), max_size=6), min_size=1, max_size=20))
    sizes = [piece for cuts in bins for piece in np.diff(sorted({0, capacity, *cuts})).tolist()]
    algorithm = data.draw(st.sampled_from(DECREASING))

    plan = plan_of(data.draw(st.permutations(sizes)), algorithm=algorithm, capacity=capacity)

    # The optimum is the number of bins. Bound: Dosa, "The tight bound of first fit decreasing" (2007).
    assert len(bins) <= plan.num_rows <= 11 / 9 * len(bins) + 6 / 9


def test_one_item_is_no_pair_with_itself() -> None:
    assert bin_packing.paired_decreasing(np.array([60, 20, 15]), capacity=100) == [0, 0, 0]
    assert bin_packing.paired_decreasing(np.array([60, 25, 20, 20]), capacity=100) == [0, 1, 0, 0]


def test_concatenative_fills_rows_in_order() -> None:
    plan = plan_of([60, 30, 20, 80, 100, 5], algorithm="concatenative")

    assert sorted(sorted(row) for row in as_lists(plan)[0]) == [[0, 1], [2, 3], [4], [5]]


def test_a_window_goes_before_the_algorithm() -> None:
    lengths = BENCHMARK["draw_lengths"](200, max_response=1024)
    plans = [as_lists(plan_of(lengths, algorithm=name, window=7, capacity=2048)) for name in ALGORITHMS]

    assert all(plan == plans[0] for plan in plans)
    assert plans[0] != as_lists(plan_of(lengths, algorithm="window_greedy", capacity=2048))


@pytest.mark.parametrize("num_sequences", [1_000, 10_000])
@pytest.mark.parametrize(("max_response", "capacity"), SETTINGS)
def test_decreasing_algorithms_need_hardly_more_bins_than_the_tokens(
    max_response: int, capacity: int, num_sequences: int
) -> None:
    lengths = BENCHMARK["draw_lengths"](num_sequences, max_response=max_response)

    for algorithm in DECREASING:
        plan = plan_of(lengths, algorithm=algorithm, capacity=capacity)
        # At 10 000 sequences that is a density above .999, where first fit decreasing has .994 to .9986.
        assert plan.num_rows <= -(-int(lengths.sum()) // capacity) + 1, algorithm


@pytest.mark.parametrize("dp_size", [8, 64])
@pytest.mark.parametrize(("max_response", "capacity"), SETTINGS)
def test_ten_thousand_sequences_are_level_in_the_fewest_rows(max_response: int, capacity: int, dp_size: int) -> None:
    lengths = BENCHMARK["draw_lengths"](10_000, max_response=max_response)
    plan = plan_of(lengths, capacity=capacity, dp_size=dp_size)
    tokens = [sum(float(lengths[row].sum()) for row in rows) for rows in plan.rows]
    squares = [sum(float((lengths[row].astype(float) ** 2).sum()) for row in rows) for rows in plan.rows]

    check_invariants(plan, lengths.tolist(), capacity=capacity, dp_size=dp_size)
    assert max(tokens) / np.mean(tokens) <= 1.02
    assert max(squares) / np.mean(squares) <= 1.05
    assert plan.num_rows == -(-int(lengths.sum()) // (capacity * dp_size))


def test_bins_that_are_enough_keep_the_room_that_levelling_needs() -> None:
    # 243 bins of first fit decreasing for 4 x 64 rows; 242 full ones could hardly exchange a sequence.
    lengths = BENCHMARK["draw_lengths"](1_000, max_response=16384)
    plan = plan_of(lengths, algorithm="first_fit_decreasing", capacity=20480, dp_size=64)
    report = report_packing(plan, lengths=lengths, capacity=20480)

    assert plan.num_packed == 243
    assert report.token_imbalance <= 1.02
    assert report.attention_imbalance <= 1.05


def test_sequences_move_between_bins_where_whole_bins_cannot_be_level() -> None:
    # Three full bins for two ranks: dealt whole, one rank has twice the other's tokens.
    lengths = np.full(24, 25)

    plan = plan_of(lengths, capacity=200, dp_size=2)

    assert plan.num_rows == 2
    assert [sum(len(row) for row in rows) for rows in plan.rows] == [12, 12]


def test_attention_weight_decides_what_is_level_where_not_both_can_be() -> None:
    # Level in tokens is 1400 : 1400; level in squares sets 800 against all the rest.
    lengths = np.array([800, 600] + [100] * 14)

    def cost_ratio(plan: RowPlan, cost: IntArray) -> float:
        sums = [float(cost[np.concatenate(rows)].sum()) for rows in plan.rows]
        return max(sums) / min(sums)

    by_tokens = plan_of(lengths, capacity=3000, dp_size=2)
    by_squares = plan_of(lengths, capacity=3000, dp_size=2, attention_weight=100.0)

    assert cost_ratio(by_tokens, lengths) < 1.3
    assert cost_ratio(by_squares, lengths + 100 * lengths**2) < 1.3
    assert cost_ratio(by_squares, lengths) > 2


def test_the_rows_of_a_rank_stand_in_falling_cost() -> None:
    lengths = BENCHMARK["draw_lengths"](500, max_response=1024)
    for rows in plan_of(lengths, capacity=2048, dp_size=4).rows:
        tokens = [int(lengths[row].sum()) for row in rows]
        assert tokens == sorted(tokens, reverse=True)


def test_the_sequences_of_a_row_stand_in_falling_length() -> None:
    lengths = BENCHMARK["draw_lengths"](500, max_response=1024)
    rows = [lengths[row] for rank in plan_of(lengths, capacity=2048, dp_size=4).rows for row in rank]
    assert all((np.diff(row) <= 0).all() for row in rows)
    assert any((np.diff(row) < 0).any() for row in rows)


def test_padding_is_reported_by_its_cause() -> None:
    plan = RowPlan(
        rows=((np.array([0, 1]), np.array([2])), (np.array([3]), np.array([], np.int64))),
        sequence_multiple=4,
        row_multiple=16,
        num_packed=3,
    )
    # Padded sequences 8 12 16 4; rows of 32 (20 + 12), 16 | 16 (4 + 12), 16 (an empty row).
    report = report_packing(plan, lengths=np.array([5, 12, 13, 4]), capacity=32)

    assert (report.num_rows, report.tokens) == (2, 34)
    assert (report.sequence_padding, report.row_padding) == (6, 40)
    assert report.density == 34 / 80
    assert report.fill == 34 / (4 * 32)
    assert report.packed_fill == 34 / (3 * 32)
    assert report.token_imbalance == 48 / 40
    assert report.attention_imbalance == (64 + 144 + 256) / ((64 + 144 + 256 + 16) / 2)


def test_an_empty_plan_is_level() -> None:
    report = report_packing(plan_of([], dp_size=2), lengths=np.zeros(0, np.int64), capacity=100)

    assert (report.density, report.token_imbalance, report.attention_imbalance) == (0, 1, 1)


def test_a_sequence_longer_than_a_row_names_both_keys() -> None:
    with pytest.raises(ValueError, match=r"max_total_sequence_length.*train_mb_tokens") as caught:
        plan_of([50, 99], sequence_multiple=8, row_multiple=16)

    for part in ("99 tokens", "104 padded", "100", "96"):
        assert part in str(caught.value)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match=rf"dppo\.packing\.window: {window}; allowed"):
        plan_of([5], window=window)


def test_a_capacity_below_the_row_multiple_is_refused() -> None:
    with pytest.raises(ValueError, match="train_mb_tokens: 100; allowed"):
        plan_of([5], row_multiple=128)
