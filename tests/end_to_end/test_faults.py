"""What a user sees when something breaks, that nothing is lost, and that the next start goes on."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from faults import FaultyRun, job, num_steps_logged
from safetensors.torch import load_file

from dppo_megatron.commands.failures import EXIT_INTERRUPTED
from dppo_megatron.stop_request import EXIT_RESUME
from dppo_megatron.watchdog import EXIT_STALLED

WORKER = Path(__file__).with_name("run_worker.py")
TWO = ("cluster.gpus_per_node=2",)


def metrics(run: Path) -> list[dict[str, float]]:
    """What metrics.jsonl says, without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith(("timing/", "performance/"))}
        for line in lines
    ]


def finish(run: Path, tiny_model: Path, *overrides: str) -> None:
    """Start the run again and let it take all its steps."""
    with FaultyRun(run.parent, job(tiny_model, run, "dppo.save_hf=false", *overrides)) as again:
        assert again.end() == 0, again.said
        assert num_steps_logged(run) == 6


def test_a_step_abandoned_at_a_signal_is_taken_again_the_same(
    tiny_model: Path, tmp_path: Path, launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyRun(tmp_path, job(tiny_model, tmp_path / "stopped")) as run:
        run.wait_until(lambda: num_steps_logged(tmp_path / "stopped") >= 1, what="first step")
        (tmp_path / "slow").touch()  # the next reward would take two minutes
        run.wait_until((tmp_path / "in_reward").exists, what="slow reward")
        start = time.monotonic()
        run.process.send_signal(signal.SIGUSR1)
        assert run.end() == EXIT_RESUME, run.said
        assert time.monotonic() - start < 25, "the step was not abandoned"
        done = num_steps_logged(tmp_path / "stopped")
        assert f"stopped by signal SIGUSR1 after step {done}" in run.said
        assert (tmp_path / "stopped" / "checkpoints" / f"step_{done}").is_dir()
        assert f"{done:,} of 6 steps" in (tmp_path / "stopped" / "report.html").read_text()
        (tmp_path / "slow").unlink()
        monkeypatch.chdir(tmp_path)
        launch(
            WORKER,
            json.dumps([job(tiny_model, tmp_path / "whole"), job(tiny_model, tmp_path / "stopped")]),
            num_processes=1,
        )
        assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
        ours, theirs = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("stopped", "whole"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_interrupted_run_leaves_its_report_and_says_that_it_was_interrupted(
    tiny_model: Path, tmp_path: Path
) -> None:
    with FaultyRun(tmp_path, job(tiny_model, tmp_path / "run")) as run:
        run.wait_until(lambda: num_steps_logged(tmp_path / "run") >= 1, what="first step")
        (tmp_path / "slow").touch()
        run.wait_until((tmp_path / "in_reward").exists, what="slow reward")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == EXIT_INTERRUPTED, run.said
        assert "interrupted" in run.said
        done = num_steps_logged(tmp_path / "run")
        assert f"{done:,} of 6 steps" in (tmp_path / "run" / "report.html").read_text()


def test_a_stopped_rank_ends_the_run_within_a_minute_of_the_limit_with_stacks(
    tiny_model: Path, tmp_path: Path
) -> None:
    with FaultyRun(tmp_path, job(tiny_model, tmp_path / "run", *TWO, "dppo.watchdog.min_seconds=15")) as run:
        run.wait_until(lambda: num_steps_logged(tmp_path / "run") >= 2, what="second step")
        run.signal_rank(1, signal.SIGSTOP)
        start = time.monotonic()
        assert run.end() == EXIT_STALLED, run.said
        assert time.monotonic() - start < 15 + 60
        assert "rank 0 has been in stage" in run.said
        assert "Current thread" in (tmp_path / "run" / "stalled" / "rank_0.txt").read_text()
        assert list((tmp_path / "run" / "checkpoints").glob("step_*")), "no checkpoint to go on from"


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_and_the_next_start_goes_on(rank: int, tiny_model: Path, tmp_path: Path) -> None:
    with FaultyRun(tmp_path, job(tiny_model, tmp_path / "run", *TWO)) as run:
        run.wait_until(lambda: num_steps_logged(tmp_path / "run") >= 3, what="third step")
        run.signal_rank(rank, signal.SIGKILL)
        start = time.monotonic()
        assert run.end() != 0
        assert time.monotonic() - start < 60
        assert f"rank {rank} was killed by SIGKILL" in run.said
        finish(tmp_path / "run", tiny_model, *TWO)


@pytest.mark.soak
def test_a_slow_rank_slows_the_run_and_no_more(tiny_model: Path, tmp_path: Path) -> None:
    with FaultyRun(tmp_path, job(tiny_model, tmp_path / "run", *TWO, "dppo.watchdog.min_seconds=40")) as run:
        run.wait_until(lambda: num_steps_logged(tmp_path / "run") >= 2, what="second step")
        for _ in range(3):
            run.signal_rank(1, signal.SIGSTOP)
            time.sleep(2)
            run.signal_rank(1, signal.SIGCONT)
            time.sleep(0.2)
        assert run.end() == 0, run.said
        assert num_steps_logged(tmp_path / "run") == 6


@pytest.mark.soak
def test_a_reward_that_hangs_ends_the_run_with_its_stack(tiny_model: Path, tmp_path: Path) -> None:
    with FaultyRun(tmp_path, job(tiny_model, tmp_path / "run", *TWO, "dppo.watchdog.min_seconds=15")) as run:
        run.wait_until(lambda: num_steps_logged(tmp_path / "run") >= 2, what="second step")
        (tmp_path / "slow").touch()
        assert run.end() == EXIT_STALLED, run.said
        stacks = [path.read_text() for path in (tmp_path / "run" / "stalled").iterdir()]
        assert len(stacks) == 2, "a rank that could has not written its stacks"
        assert any("in stage reward" in text.splitlines()[0] for text in stacks)
        (tmp_path / "slow").unlink()
        finish(tmp_path / "run", tiny_model, *TWO)


@pytest.mark.soak
def test_a_checkpoint_directory_that_vanishes_is_named(tiny_model: Path, tmp_path: Path) -> None:
    # A file stands where the directory was: not even root can write there.
    import shutil

    with FaultyRun(tmp_path, job(tiny_model, tmp_path / "run", "grpo.max_num_steps=200")) as run:
        checkpoints = tmp_path / "run" / "checkpoints"
        run.wait_until((checkpoints / "step_2").exists, what="first checkpoint")
        run.process.send_signal(signal.SIGSTOP)
        shutil.move(checkpoints, tmp_path / "kept")
        checkpoints.write_text("")
        run.process.send_signal(signal.SIGCONT)
        assert run.end() == 1, run.said
        assert "checkpoints" in run.said
        assert "Traceback" not in run.said
        checkpoints.unlink()
        shutil.move(tmp_path / "kept", checkpoints)
        finish(tmp_path / "run", tiny_model)


@pytest.mark.soak
def test_a_run_that_must_have_saved_by_some_time_saves_and_asks_for_another_start(
    tiny_model: Path, tmp_path: Path
) -> None:
    overrides = ["grpo.max_num_steps=100000", "data.shuffle=true", "grpo.max_num_epochs=1000"]
    limit = "++checkpointing.checkpoint_must_save_by=00:00:25"
    with FaultyRun(
        tmp_path, job(tiny_model, tmp_path / "run", *overrides, "checkpointing.save_period=100000", limit)
    ) as run:
        start = time.monotonic()
        assert run.end() == EXIT_RESUME, run.said
        assert time.monotonic() - start < 60
        assert "stopped by checkpointing.checkpoint_must_save_by" in run.said
        done = num_steps_logged(tmp_path / "run")
        assert (tmp_path / "run" / "checkpoints" / f"step_{done}").is_dir()


JUMPING_CLOCK = """
import itertools, time

true_time, calls = time.time, itertools.count()
time.time = lambda: true_time() + (86400.0 if next(calls) % 2 else -86400.0)
"""


@pytest.mark.soak
def test_a_clock_that_jumps_by_days_disturbs_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(JUMPING_CLOCK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'clock'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    limits = ("checkpointing.checkpoint_must_save_by=00:02:00", "dppo.watchdog.min_seconds=600")
    with FaultyRun(tmp_path, job(tiny_model, tmp_path / "run", *TWO, *limits)) as run:
        assert run.end() == 0, run.said
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [value for line in lines for name, value in line.items() if name.startswith("timing/")]
    assert len(lines) == 6
    assert min(seconds) >= 0.0
    assert max(seconds) < 3600.0
