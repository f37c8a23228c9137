import json
import os
import subprocess
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from dppo_megatron.provenance import git_state, installed_versions, write_provenance


def write(directory: Path, *, first_step: int = 0, config: dict[str, Any] | None = None) -> None:
    write_provenance(
        directory,
        config={"b": 1, "a": [1, 2]} if config is None else config,
        command=["dppo", "train", "a.yaml", "grpo.seed=7"],
        first_step=first_step,
        world_size=8,
        tensor_parallel=2,
        pipeline_parallel=1,
        context_parallel=2,
    )


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", *identity, "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "module.py").write_text("a = 1\n")
    git(tmp_path, "add", "module.py")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    return tmp_path


def test_the_config_comes_back_from_its_file_in_its_order(tmp_path: Path) -> None:
    config = {"policy": {"model_name": "модель", "lr": 5e-6}, "dppo": None, "ids": (1, 2), "flag": True}
    write(tmp_path, config=config)
    read = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert read == config | {"ids": [1, 2]}
    assert list(read) == list(config)


def test_a_config_with_an_object_in_it_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plain values"):
        write(tmp_path, config={"path": Path("a")})
    assert not list(tmp_path.iterdir())


def test_every_start_of_the_run_is_kept(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, first_step=40)
    starts = json.loads((tmp_path / "provenance.json").read_text())["starts"]
    assert [start["first_step"] for start in starts] == [0, 40]
    assert starts[0]["command"] == ["dppo", "train", "a.yaml", "grpo.seed=7"]
    assert starts[0]["world_size"] == 8
    assert starts[0]["layout"] == {"tp": 2, "pp": 1, "cp": 2}
    assert datetime.fromisoformat(starts[0]["started"]).tzinfo is not None


def test_the_host_is_not_recorded(tmp_path: Path) -> None:
    write(tmp_path)
    start = json.loads((tmp_path / "provenance.json").read_text())["starts"][0]
    assert set(start) == {"started", "first_step", "command", "world_size", "layout", "versions", "git"}


def test_versions_are_those_installed_and_absent_packages_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dppo_megatron.provenance._DISTRIBUTIONS", ("numpy", "no-such-distribution"))
    versions = installed_versions()
    assert set(versions) == {"python", "numpy"}
    assert versions["numpy"] == version("numpy")


def test_a_clean_checkout_is_its_commit(checkout: Path) -> None:
    state = git_state(checkout / "module.py")
    assert state is not None
    assert state.commit == git(checkout, "rev-parse", "HEAD")
    assert not state.dirty


def test_a_changed_tracked_file_makes_the_checkout_dirty_and_a_new_one_does_not(checkout: Path) -> None:
    (checkout / "notes.txt").write_text("new")
    state = git_state(checkout / "module.py")
    assert state is not None
    assert not state.dirty
    (checkout / "module.py").write_text("a = 2\n")
    state = git_state(checkout / "module.py")
    assert state is not None
    assert state.dirty


def test_a_package_installed_inside_somebody_elses_checkout_has_no_commit(checkout: Path) -> None:
    installed = checkout / "site-packages" / "module.py"
    installed.parent.mkdir()
    installed.write_text("a = 1\n")
    assert git_state(installed) is None


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PATH", "/nowhere")
    assert git_state(checkout / "module.py") is None
