import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dppo_megatron import metric_names
from dppo_megatron.run_log import RunLog, SilentLog
from dppo_megatron.run_records import StepRecord
from dppo_megatron.stage_clock import StageSeconds


def a_step(step: int, *, accuracy: float | None = None, extra: tuple[tuple[str, float], ...] = ()) -> StepRecord:
    return StepRecord(
        step=step,
        reward=0.25 + step / 100,
        accuracy=accuracy,
        kept_fraction=0.5,
        kept_prompts_fraction=0.75,
        rollout_tokens=1000 + step,
        train_tokens=400 + step,
        train_tokens_without_pruning=1600 + step,
        loss=-0.01,
        grad_norm=1.5,
        learning_rate=1e-3,
        stage_seconds=StageSeconds(rollout=2.0, update=1.0, validation=0.5, checkpoint=0.25, other=0.125),
        extra=extra,
    )


def open_log(directory: Path, *, console: io.StringIO | None = None, tensorboard: bool = False) -> RunLog:
    return RunLog(directory, num_steps=10, tensorboard=tensorboard, console=console or io.StringIO())


def lines(directory: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def verbs(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def log_steps(log: RunLog, steps: range) -> None:
    for step in steps:
        log.step(a_step(step))


def test_a_step_is_one_line_under_nemo_rls_names_readable_before_the_run_ends(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.step(a_step(0, accuracy=0.5, extra=((metric_names.PROBS_RATIO, 1.01),)))
    (line,) = lines(tmp_path)
    log.close()
    expected = {
        "step": 0,
        "train/reward": 0.25,
        "train/loss": -0.01,
        "train/grad_norm": 1.5,
        "train/lr": 1e-3,
        "train/global_valid_toks": 400,
        "train/probs_ratio": 1.01,
        "validation/accuracy": 0.5,
        "dppo/kept_fraction": 0.5,
        "dppo/kept_prompts_fraction": 0.75,
        "dppo/rollout_tokens": 1000,
        "dppo/train_tokens_without_pruning": 1600,
        "timing/train/total_step_time": 3.875,
        "timing/train/generation": 2.0,
        "timing/train/policy_training": 1.0,
        "timing/validation/total_validation_time": 0.5,
        "timing/train/checkpointing": 0.25,
        "timing/train/other": 0.125,
    }
    assert {name: value for name, value in line.items() if value != 0 or name == "step"} == expected


def test_a_step_without_validation_has_no_accuracy(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(a_step(0))
    assert "validation/accuracy" not in lines(tmp_path)[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_null_counted_and_told_once(tmp_path: Path, value: float) -> None:
    console = io.StringIO()
    with open_log(tmp_path, console=console) as log:
        log.step(replace(a_step(0), loss=value))
        log.step(replace(a_step(1), loss=value))
        log.summary()
    assert [line["train/loss"] for line in lines(tmp_path)] == [None, None]
    assert console.getvalue().count("not finite, logged as null: train/loss") == 1
    assert summary(tmp_path)["non_finite"] == 2


def test_optimizer_steps_that_were_not_taken_are_told(tmp_path: Path) -> None:
    console = io.StringIO()
    log = open_log(tmp_path, console=console)
    log.step(a_step(0, extra=((metric_names.IDLE_UPDATES, 0.0),)))
    assert "not taken" not in console.getvalue()
    log.step(a_step(1, extra=((metric_names.IDLE_UPDATES, 1.0),)))
    assert "step 2: 1 optimizer step not taken: nothing that was kept has a gradient" in console.getvalue()
    log.close()


def test_numpy_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(replace(a_step(0), rollout_tokens=np.int64(7), reward=np.float32(0.5)))  # type: ignore[arg-type]
    assert lines(tmp_path)[0]["dppo/rollout_tokens"] == 7
    assert lines(tmp_path)[0]["train/reward"] == 0.5


def test_extra_cannot_overwrite_a_field_of_the_step() -> None:
    with pytest.raises(AssertionError, match="train/loss"):
        a_step(0, extra=((metric_names.LOSS, 3.0),))


def test_a_line_reads_back_as_its_step() -> None:
    record = a_step(3, accuracy=0.5, extra=((metric_names.PROBS_RATIO, 1 / 3),))
    assert StepRecord.from_json(record.to_json()) == record
    broken = StepRecord.from_json(replace(record, loss=math.nan).to_json())
    assert math.isnan(broken.loss)


def test_resuming_cuts_metrics_back_to_the_steps_before_and_goes_on(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log_steps(log, range(6))
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    with open_log(tmp_path) as log:
        log.resume_from(4)
        log.step(replace(a_step(4), reward=9.0))
    after = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert after[:4] == before[:4]
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]
    assert lines(tmp_path)[4]["train/reward"] == 9.0


def test_a_last_line_cut_short_by_a_crash_is_dropped(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log_steps(log, range(3))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    with open_log(tmp_path) as log:
        log.resume_from(2)
        log.step(a_step(2))
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("line", ["{", "[1]", '{"step": 1}'])
def test_a_line_that_is_no_step_stops_the_resume_and_is_named(tmp_path: Path, line: str) -> None:
    text = f"{a_step(0).to_json()}\n{line}\n{a_step(2).to_json()}\n"
    (tmp_path / "metrics.jsonl").write_text(text)
    with open_log(tmp_path) as log, pytest.raises(RuntimeError, match=r"metrics\.jsonl:2 is not a step's line"):
        log.resume_from(3)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_steps_that_are_missing_from_the_kept_lines_are_told(tmp_path: Path) -> None:
    console = io.StringIO()
    with open_log(tmp_path) as log:
        log_steps(log, range(3))
    with open_log(tmp_path, console=console) as log:
        log.resume_from(5)
        log.step(a_step(5))
    assert "2 of the 5 steps done are missing" in console.getvalue()


def test_an_earlier_runs_steps_are_not_mixed_with_a_new_runs(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log_steps(log, range(2))
    with open_log(tmp_path) as log, pytest.raises(RuntimeError, match="holds an earlier run"):
        log.step(a_step(0))
    assert len(lines(tmp_path)) == 2
    for _ in range(2):
        with open_log(tmp_path) as log:
            log.resume_from(0)
            log.step(a_step(0))
    assert len(lines(tmp_path)) == 1
    assert [len(lines(tmp_path / f"earlier_{number}")) for number in (1, 2)] == [2, 1]


def test_a_step_out_of_order_is_refused(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.step(a_step(0))
        with pytest.raises(AssertionError, match="step 2 after step 0"):
            log.step(a_step(2))


def test_a_resumed_runs_summary_is_that_of_one_that_never_stopped(tmp_path: Path) -> None:
    def run(log: RunLog, steps: range) -> None:
        for step in steps:
            log.step(a_step(step, accuracy=0.3 + step / 10 if step % 2 else None))

    with open_log(tmp_path / "whole") as log:
        log.baseline(0.125)
        run(log, range(6))
        log.summary()
    with open_log(tmp_path / "stopped") as log:
        log.baseline(0.125)
        run(log, range(5))
    with open_log(tmp_path / "stopped") as log:
        log.resume_from(3)
        run(log, range(3, 6))
        log.summary()
    whole, resumed = summary(tmp_path / "whole"), summary(tmp_path / "stopped")
    assert whole.pop("run_directory") != resumed.pop("run_directory")
    assert resumed == whole


def test_the_summary_adds_up_the_steps(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.baseline(0.125)
        log.step(a_step(0, accuracy=0.5))
        log.step(a_step(1, accuracy=0.75))
        log.step(a_step(2))
        log.summary()
    read = summary(tmp_path)
    shares = read.pop("stage_shares")
    seconds = read.pop("stage_seconds")
    assert read == {
        "accuracy_before": 0.125,
        "accuracy_after": 0.75,
        "steps": 3,
        "rollout_tokens": 3003,
        "train_tokens": 1203,
        "train_tokens_without_pruning": 4803,
        "rollout_tokens_saved_fraction": pytest.approx(1 - 3003 / 4803),
        "train_tokens_saved_fraction": pytest.approx(1 - 1203 / 4803),
        "completions_dropped_fraction": 0.5,
        "prompts_dropped_fraction": 0.25,
        "train_seconds": 3 * (2.0 + 1.0 + 0.125),
        "non_finite": 0,
        "run_directory": str(tmp_path),
    }
    assert seconds["rollout"] == 6.0
    assert shares["rollout"] == pytest.approx(2.0 / 3.875)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_run_without_steps_has_a_summary(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.summary()
    assert summary(tmp_path)["steps"] == 0
    assert summary(tmp_path)["accuracy_after"] is None


def test_tensorboard_holds_the_last_made_value_of_each_step(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with open_log(tmp_path, tensorboard=True) as log:
        log.baseline(0.125)
        log_steps(log, range(4))
    with open_log(tmp_path, tensorboard=True) as log:
        log.resume_from(2)
        log.step(replace(a_step(2, accuracy=0.5), reward=9.0))
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("train/reward")]
    accuracies = [(event.step, event.value) for event in events.Scalars("validation/accuracy")]
    assert rewards == [(1, pytest.approx(0.25)), (2, pytest.approx(0.26)), (3, 9.0)]
    assert accuracies == [(0, 0.125), (3, 0.5)]


def test_without_tensorboard_no_event_files_are_made(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.baseline(0.125)
        log.step(a_step(0))
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "messages.jsonl"}


def test_the_silent_log_has_the_logs_verbs_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verbs(SilentLog) == verbs(RunLog)
    with SilentLog() as log:
        log.resume_from(1)
        log.baseline(0.5)
        log.step(a_step(1))
        log.note("hello")
        log.summary()
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")
