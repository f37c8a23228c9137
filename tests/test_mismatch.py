from dataclasses import fields

import pytest

from dppo_megatron import metric_names
from dppo_megatron.mismatch import MismatchWatch
from dppo_megatron.run_records import StepRecord
from dppo_megatron.stage_clock import StageSeconds


def record(step: int, mismatch: float) -> StepRecord:
    return StepRecord(
        step=step,
        reward=0.0,
        accuracy=None,
        kept_fraction=1.0,
        kept_prompts_fraction=1.0,
        rollout_tokens=1,
        train_tokens=1,
        train_tokens_without_pruning=1,
        loss=0.0,
        grad_norm=1.0,
        learning_rate=1.0,
        stage_seconds=StageSeconds(*[0.0 for _ in fields(StageSeconds)]),
        extra=((metric_names.SAMPLER_MISMATCH, mismatch),),
    )


def test_a_disagreement_past_its_limit_is_told_once_until_it_was_below() -> None:
    watch = MismatchWatch(0.05, fp8_training=False)
    told = [watch.note(record(step, value)) for step, value in enumerate((0.01, 0.05, 0.2, 0.3, 0.04, 0.06))]
    assert [note is not None for note in told] == [False, False, True, False, False, True]


def test_the_note_names_the_step_the_value_and_the_usual_causes() -> None:
    note = MismatchWatch(0.05, fp8_training=False).note(record(6, 0.1234))
    assert note is not None
    for part in (
        "step 7",
        "0.123",
        "dppo.rollout.mismatch_warning = 0.05",
        "bias_activation_fusion",
        "prefix cache",
        "FP8",
    ):
        assert part in note


@pytest.mark.parametrize("fp8_training", [False, True])
def test_fp8_training_is_a_cause_where_it_is_on(fp8_training: bool) -> None:
    note = MismatchWatch(0.05, fp8_training=fp8_training).note(record(6, 0.1234))
    assert note is not None
    assert ("FP8 training" in note) == fp8_training
