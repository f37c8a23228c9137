from pathlib import Path

import pytest

from dppo_megatron.report.comparison import Difference, Spent, accuracy_over, compare, validations
from dppo_megatron.report.run_data import read_run
from tests.report.run_directories import write_run


def test_the_cost_to_a_target_is_that_of_the_first_validation_at_or_above_it(tmp_path: Path) -> None:
    slow = read_run(write_run(tmp_path / "slow", accuracies={-1: 0.1, 4: 0.5, 9: 0.8}))
    fast = read_run(write_run(tmp_path / "fast", accuracies={-1: 0.1, 2: 0.81}, seconds=1.0, tokens=400))
    comparison = compare([slow, fast])
    assert comparison.target == 0.8
    # Validation takes 5 s a step in these runs and does not count.
    assert comparison.reached == (
        Spent(steps=10, rollout_tokens=10_000, train_tokens=2500, seconds=20.0),
        Spent(steps=3, rollout_tokens=1200, train_tokens=300, seconds=3.0),
    )
    assert compare([slow, fast], target=0.9).reached == (None, None)


def test_only_settings_that_differ_are_told(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / name, accuracies={}, rate=rate)) for name, rate in (("a", 0.5), ("b", 0.25))
    ]
    comparison = compare(runs)
    assert comparison.differences == (Difference("dppo.completion_pruning.rate", ("0.5", "0.25")),)
    assert comparison.target is None


def test_the_accuracy_before_training_is_the_curve_s_first_point(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", accuracies={-1: 0.1, 4: 0.5}))
    assert [one.accuracy for one in validations(run)] == [0.1, 0.5]
    line = accuracy_over(run, "tokens", name="run")
    assert (line.x, line.y) == ((0.0, 6250.0), (0.1, 0.5))


def test_one_run_and_an_impossible_target_are_refused(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", accuracies={}))
    with pytest.raises(ValueError, match="RUN"):
        compare([run])
    with pytest.raises(ValueError, match=r"--target: 80\.0"):
        compare([run, run], target=80.0)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / parent / "run", accuracies={})) for parent in ("a", "b")]
    assert compare(runs).names == (str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run"))
