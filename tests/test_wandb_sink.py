"""Weights & Biases in offline mode; skipped where its package, an optional extra, is not installed."""

import io
from pathlib import Path

import pytest

from dppo_megatron.config.logger_section import WandbConfig
from dppo_megatron.run_log import RunLog
from dppo_megatron.wandb_sink import WandbSink, keep_id
from tests.report.run_directories import a_step


def test_two_starts_of_a_run_are_one_run_there_with_all_metrics(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for start in (0, 1):
        sink = WandbSink(tmp_path, WandbConfig(project="tests"), run_id=keep_id(tmp_path, resumed=None))
        with RunLog(tmp_path, num_steps=2, tensorboard=False, console=io.StringIO(), wandb=sink) as log:
            log.resume_from(start)
            log.step(a_step(start, accuracy=0.5))
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len({path.name.rpartition("-")[2] for path in runs}) == 1
    stored = b"".join(file.read_bytes() for file in (tmp_path / "wandb").rglob("*.wandb"))
    assert stored.count(b"validation/accuracy") >= 2
    assert b"train/reward" in stored


def test_without_the_package_the_user_is_told_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        WandbSink(tmp_path, WandbConfig(), run_id="0123abcd")


def test_the_checkpoint_s_id_is_the_run_s_wherever_it_continues(tmp_path: Path) -> None:
    first = keep_id(tmp_path / "first", resumed=None)
    assert keep_id(tmp_path / "first", resumed=None) == first
    other = keep_id(tmp_path / "other", resumed=None)
    assert other != first
    # A start in another directory, or in one that an abandoned start has marked.
    assert keep_id(tmp_path / "moved", resumed=first) == keep_id(tmp_path / "other", resumed=first) == first
    assert keep_id(tmp_path / "other", resumed=None) == first
