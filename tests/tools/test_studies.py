"""Studies over seeds: what a run had spent at an accuracy, intervals, and runs that are kept."""

from pathlib import Path

import pytest

from tools.benchmarks import against_trl, grpo_against_dppo
from tools.benchmarks.grpo_task import Point
from tools.benchmarks.study import Interval, Run, all_spent_until, collect, spent_until


def run_of(*accuracies: float, cost: float) -> Run:
    """A validation every ten steps; a step costs so much."""
    return tuple(
        Point(10 * number, accuracy, 2 * cost * number, 10 * cost * number, 100 * number, 50 * number)
        for number, accuracy in enumerate(accuracies, 1)
    )


def test_what_was_spent_at_an_accuracy_is_found_between_validations() -> None:
    reached = spent_until(run_of(0.4, 0.8, 0.9, cost=3.0), 0.6)
    assert reached is not None
    assert (reached.step, reached.processor_seconds, reached.sampled_tokens) == pytest.approx((15, 45.0, 150))
    assert spent_until(run_of(0.4, cost=3.0), 0.6) is None


def test_a_run_that_never_got_there_is_named_with_what_it_reached() -> None:
    with pytest.raises(ValueError, match=r"--target 0\.6: a run reached 0\.500 at most"):
        all_spent_until([run_of(0.7, cost=1.0), run_of(0.5, cost=1.0)], 0.6)


def test_an_interval_is_students_and_one_seed_has_none() -> None:
    # Two values: the standard error is half their distance, t of one degree of freedom 12.706.
    assert Interval.of([1.0, 3.0]).half_width == pytest.approx(12.706)
    assert Interval.of([1.0, 3.0]).text(1) == "2.0 ± 12.7"
    assert Interval.of([2.0]).text(1) == "2.0"


def test_a_run_is_made_once_and_never_mistaken_for_one_of_other_settings(tmp_path: Path) -> None:
    made: list[int] = []

    def train(seed: int) -> Run:
        made.append(seed)
        return run_of(0.5 + seed / 10, cost=1.0)

    first = collect({"a trainer": train}, settings={"steps": 10}, seeds=2, kept=tmp_path)
    again = collect({"a trainer": train}, settings={"steps": 10}, seeds=3, kept=tmp_path)
    assert made == [0, 1, 2]
    assert again["a trainer"][:2] == first["a trainer"]
    with pytest.raises(ValueError, match=r"a_trainer_0\.json is of other settings: \{'steps': 10\}"):
        collect({"a trainer": train}, settings={"steps": 20}, seeds=1, kept=tmp_path)


def test_the_table_against_trl_has_ratios_of_the_same_seeds_and_says_who_never_got_there() -> None:
    runs = {
        "TRL": [run_of(0.4, 0.8, cost=4.0), run_of(0.4, 0.8, cost=8.0)],
        "ours": [run_of(0.8, 0.9, cost=2.0), run_of(0.8, 0.9, cost=4.0)],
        "slow": [run_of(0.2, 0.3, cost=4.0), run_of(0.2, 0.8, cost=8.0)],
    }
    _, _, trl, ours, slow = against_trl.report(runs, target=0.8).splitlines()
    assert trl.startswith("| TRL | 6.000 ± 25.412 | 1.00 ± 0.00 | 20 ± 0 |")
    assert [cell.strip() for cell in ours.split("|")][3:7] == ["2.00 ± 0.00", "10 ± 0", "30.0 ± 127.1", "4.00 ± 0.00"]
    assert "| never in 1 of 2 |" in slow


def test_the_table_against_grpo_has_the_methods_share() -> None:
    runs = {
        "grpo": [run_of(0.4, 0.8, cost=4.0), run_of(0.4, 0.8, cost=4.0)],
        "dppo": [run_of(0.8, 0.9, cost=2.0), run_of(0.8, 0.9, cost=2.0)],
    }
    last = grpo_against_dppo.report(runs, target=0.8).splitlines()[-1]
    cells = [cell.strip() for cell in last.split("|")]
    assert cells[2] == "0.100 ± 0.000"
    assert cells[6] == cells[7] == "0.500 ± 0.000"
    assert cells[10] == "0.250 ± 0.000"
