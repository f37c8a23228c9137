import contextlib
from typing import get_args

import pytest

from dppo_megatron import metric_names
from dppo_megatron.stage_clock import STAGES, Stage, StageClock, StageSeconds


class FakeTime:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def pass_seconds(self, seconds: float) -> None:
        self.seconds += seconds


def run_stage(clock: StageClock, time: FakeTime, name: Stage, seconds: float) -> None:
    with clock.stage(name):
        time.pass_seconds(seconds)


def test_a_stage_entered_twice_in_a_step_adds_up_and_the_rest_is_other() -> None:
    time = FakeTime()
    clock = StageClock(now=time)
    run_stage(clock, time, "update", 2.0)
    time.pass_seconds(0.5)
    run_stage(clock, time, "rollout", 4.0)
    run_stage(clock, time, "update", 1.0)
    time.pass_seconds(0.25)
    assert clock.step_seconds() == StageSeconds(rollout=4.0, update=3.0, other=0.75)


def test_each_step_starts_at_zero_and_the_run_adds_up_to_the_elapsed_time() -> None:
    time = FakeTime()
    clock = StageClock(now=time)
    for seconds in (1.0, 2.0, 4.0):
        run_stage(clock, time, "rollout", seconds)
        time.pass_seconds(0.5)
        assert clock.step_seconds() == StageSeconds(rollout=seconds, other=0.5)
    assert clock.run_seconds == StageSeconds(rollout=7.0, other=1.5)
    assert clock.run_seconds.total == time.seconds - 100.0


def test_nested_stages_are_refused() -> None:
    clock = StageClock(now=FakeTime())
    with pytest.raises(AssertionError, match="'update' inside stage 'rollout'"), clock.stage("rollout"):
        run_stage(clock, FakeTime(), "update", 1.0)


def test_a_step_does_not_end_inside_a_stage() -> None:
    clock = StageClock(now=FakeTime())
    with clock.stage("rollout"), pytest.raises(AssertionError, match="inside stage 'rollout'"):
        clock.step_seconds()


def test_a_stage_that_raises_is_counted_and_left() -> None:
    time = FakeTime()
    clock = StageClock(now=time)
    with contextlib.suppress(OSError), clock.stage("checkpoint"):
        time.pass_seconds(3.0)
        raise OSError
    run_stage(clock, time, "update", 1.0)
    assert clock.step_seconds() == StageSeconds(checkpoint=3.0, update=1.0)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(AssertionError, match="'warmup' is not one of"):
        run_stage(StageClock(now=FakeTime()), FakeTime(), "warmup", 1.0)  # type: ignore[arg-type]


def test_shares_are_fractions_of_the_total_and_zero_of_nothing() -> None:
    seconds = StageSeconds(rollout=6.0, update=1.5, validation=0.5)
    assert seconds.shares() == StageSeconds(rollout=0.75, update=0.1875, validation=0.0625)
    assert StageSeconds().shares() == StageSeconds()


def test_training_time_leaves_out_validation_and_checkpoints() -> None:
    seconds = StageSeconds(rollout=1.0, update=2.0, validation=4.0, checkpoint=8.0, other=16.0)
    assert seconds.training == 19.0


def test_stages_their_seconds_and_their_metric_names_go_together() -> None:
    assert get_args(Stage) == STAGES
    assert len(metric_names.STAGE_SECONDS) == len(STAGES)
    assert StageSeconds(weight_sync=1.0, other=2.0).items()[:: len(STAGES) - 1] == (
        ("weight_sync", 1.0),
        ("other", 2.0),
    )
