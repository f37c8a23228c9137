"""The packing benchmarks: the peers' rules do what their sources say, and the tables give what was planned."""

import json
import sys

import numpy as np
import pytest

from tools.benchmarks import packing
from tools.benchmarks.packing_peers import (
    RULES,
    Rows,
    Rule,
    cell,
    differencing,
    halve_heaviest,
    nemo_rl,
    ours,
    verl,
)

CAPACITY = 2048
LENGTHS = packing.draw_lengths(320, max_response=1024)
SEQUENCES = LENGTHS.tolist()


def token_imbalance(ranks: list[Rows]) -> float:
    """Most over mean."""
    tokens = np.array([sum(SEQUENCES[item] for row in rank for item in row) for rank in ranks])
    return float(tokens.max() / tokens.mean())


def attention_imbalance(ranks: list[Rows]) -> float:
    """Most over mean."""
    squares = np.array([sum(SEQUENCES[item] ** 2 for row in rank for item in row) for rank in ranks])
    return float(squares.max() / squares.mean())


@pytest.mark.parametrize("dp_size", [1, 3, 16])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_sequence_stands_in_one_row_and_ranks_have_equally_many_rows(rule: Rule, dp_size: int) -> None:
    ranks = rule(SEQUENCES, CAPACITY, dp_size)
    assert sorted(item for rank in ranks for row in rank for item in row) == list(range(len(SEQUENCES)))
    assert len(ranks) == dp_size
    assert len({len(rank) for rank in ranks}) == 1
    if rule is not verl:
        assert all(sum(SEQUENCES[item] for item in row) <= CAPACITY for rank in ranks for row in rank)


def test_nemo_rl_makes_a_row_of_one_sequence_of_the_last_fullest_row_and_deals_in_turn() -> None:
    lengths = [6, 4, 7, 3, 8, 2]
    ranks = nemo_rl(lengths, 10, 2)
    assert [[[lengths[item] for item in row] for row in rank] for rank in ranks] == [[[8, 2], [6]], [[7, 3], [4]]]


def test_nemo_rl_fills_the_emptiest_row_with_what_no_large_sequence_has_room_for() -> None:
    lengths = [9, 5, 5, 4, 3, 3]
    (rows,) = nemo_rl(lengths, 10, 1)
    assert [[lengths[item] for item in row] for row in rows] == [[9], [5, 5], [4, 3, 3]]
    lengths = [5, 4, 4, 3, 1]
    (rows,) = nemo_rl(lengths, 10, 1)
    assert [[lengths[item] for item in row] for row in rows] == [[5, 4], [4, 3, 1]]  # first fit has [5, 4, 1]


def test_verl_goes_over_the_cap_and_the_strict_rule_takes_a_row_more() -> None:
    lengths = [7] * 8
    (rows,) = verl(lengths, 8, 1)
    assert sorted(map(len, rows)) == [1] * 6 + [2]
    (rows,) = verl(lengths, 8, 1, strict=True)
    assert list(map(len, rows)) == [1] * 8
    (rows,) = verl([5] * 4 + [1] * 4, 8, 1, strict=True)  # the tokens need three
    assert list(map(len, rows)) == [2] * 4
    assert cell(verl, np.array(lengths), capacity=8, dp_size=1).startswith("7 (7), 1.000, 1.000, 1, ")


def test_the_differencing_method_has_its_textbook_answer() -> None:
    parts = differencing([8, 7, 6, 5, 4], parts=2, equal_size=False)
    assert sorted(sum([8, 7, 6, 5, 4][item] for item in part) for part in parts) == [14, 16]
    weights = [1, 2, 3, 4, 5, 6]
    parts = differencing(weights, parts=3, equal_size=True)
    assert sorted(sorted(weights[item] for item in part) for part in parts) == [[1, 6], [2, 5], [3, 4]]


def test_the_heaviest_row_of_several_sequences_is_halved() -> None:
    rows = [[0, 1], [2], [3, 4, 5]]
    halve_heaviest(rows, [1, 1, 99, 5, 3, 3], 2)
    assert rows == [[0, 1], [2], [3], [4, 5]]


def test_ours_has_the_least_rows_and_is_more_level_than_whole_rows_dealt_out() -> None:
    others = {name: rule(SEQUENCES, CAPACITY, 5) for name, rule in RULES.items() if rule not in (ours, verl)}
    mine = ours(SEQUENCES, CAPACITY, 5)
    assert len(mine[0]) == -(-sum(SEQUENCES) // (5 * CAPACITY))
    assert all(len(mine[0]) < len(ranks[0]) for ranks in others.values())
    for name in ("NeMo-RL", "slime", "prime-rl"):
        assert token_imbalance(mine) < token_imbalance(others[name]), name
        assert attention_imbalance(mine) < attention_imbalance(others[name]), name


def test_the_table_measures_what_a_rule_returns() -> None:
    ranks = nemo_rl(SEQUENCES, CAPACITY, 16)
    rows, tokens, attention, over, _ = cell(nemo_rl, LENGTHS, capacity=CAPACITY, dp_size=16).split(", ")
    assert rows.split()[0] == str(len(ranks[0]))
    assert tokens == f"{token_imbalance(ranks):.3f}" != "1.000"
    assert attention == f"{attention_imbalance(ranks):.3f}"
    assert over == "0"


def test_chosen_algorithms_alone_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*options: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["packing.py", "--sequences", "64", "--json", *options])
        packing.main()
        return [figure["algorithm"] for figure in json.loads(capsys.readouterr().out)]

    assert measured("--algorithms", "concatenative") == ["concatenative"] * len(packing.SETTINGS)
    assert set(measured()) == {*packing.ALGORITHMS, "window_greedy 32", "window_greedy 512"}
