"""GRESO: prompts after runs of equal rewards, and the controller of how many of them are kept."""

import numpy as np
import pytest

from dppo_megatron.config.schema import GresoConfig
from dppo_megatron.rl.greso import Exploration

CONFIG = GresoConfig()


def test_a_prompt_is_kept_with_p_to_the_power_of_its_run_but_not_below_the_least() -> None:
    runs = np.array([0, 1, 3, -1, -2, -40])
    p = Exploration(easy=0.5, hard=0.8).keep_probabilities(runs, config=CONFIG)
    np.testing.assert_allclose(p, [1, 0.5, 0.125, 0.8, 0.64, 0.01])


def test_without_exploration_the_least_probability_is_left_for_runs_alone() -> None:
    p = Exploration(easy=0.0, hard=0.0).keep_probabilities(np.array([0, 1, -7]), config=CONFIG)
    np.testing.assert_array_equal(p, [1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("num_easy", "num_hard", "easy", "hard"), [(2, 4, 0.49, 0.49), (2, 3, 0.49, 0.51), (1, 9, 0.51, 0.49)]
)
def test_the_controller_steps_down_at_the_target_share_and_up_below_it(num_easy, num_hard, easy, hard) -> None:
    # The targets are a twelfth and a sixth: of 24 groups 2 easy and 4 hard ones.
    moved = Exploration(0.5, 0.5).moved(num_easy=num_easy, num_hard=num_hard, num_groups=24, config=CONFIG)
    assert (moved.easy, moved.hard) == (pytest.approx(easy), pytest.approx(hard))


def test_exploration_stays_a_probability() -> None:
    assert Exploration(1.0, 0.0).moved(num_easy=0, num_hard=9, num_groups=9, config=CONFIG) == Exploration(1.0, 0.0)
