from pathlib import Path

import pytest

from dppo_megatron.report.run_data import read_run
from dppo_megatron.report.sample_text import samples_text
from tests.report.run_directories import HOSTILE, write_run


def test_the_best_come_first_then_the_worst(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", accuracies={}))
    text = samples_text(run, step=5, count=1)
    assert text.startswith("step 5: 4 completions, mean reward 0.500, 2 kept for training")
    best, worst = text.split("worst\n")
    assert "reward 1 " in best
    assert "kept, weight 2.00" in best
    assert "reward 0 " in worst
    assert "keep probability 1 x 0.5" in worst
    assert HOSTILE in best  # a terminal gets the prompt as it is


def test_the_last_recorded_step_is_the_default_and_others_are_refused_by_name(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", accuracies={}))
    assert samples_text(run, step=None, count=2).startswith("step 10:")
    with pytest.raises(ValueError, match="--step: 2 was not recorded"):
        samples_text(run, step=2, count=2)
