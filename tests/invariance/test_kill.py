"""A run that is killed at any moment, while it saves too, ends as the run that nobody killed."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from run_jobs import job, metrics, write_prompts
from safetensors.torch import load_file

WORKER = Path(__file__).with_name("kill_worker.py")


@dataclass(frozen=True)
class Killed:
    """The directory of runs, and of each killed run its starts."""

    root: Path
    starts: list[list[dict[str, int]]]

    @property
    def num_kills(self) -> int:
        """Of all runs."""
        return sum(start["killed"] for run in self.starts for start in run)


def kill(
    root: Path, model: Path, launch, *, num_steps: int, num_kills: int, num_runs: int, most_saves: int, seed: int
) -> Killed:
    """Run once in peace, and ``num_runs`` times with kills."""
    write_prompts(model, root)
    extra = ("checkpointing.save_period=1", "checkpointing.keep_top_k=2")

    def order(name: str) -> list[str]:
        return job(model, root / name, num_steps=num_steps, extra=extra)

    # The reward is imported by name, from the folder of the worker of whole runs.
    runs = [f"killed_{number}" for number in range(num_runs)]
    arguments = {
        "whole": order("whole"),
        "killed": [order(name) for name in runs],
        "num_kills": num_kills,
        "most_saves": most_saves,
        "seed": seed,
        "report": str(root / "report.json"),
    }
    launch(WORKER, json.dumps(arguments), num_processes=1, timeout_seconds=3000)
    return Killed(root, json.loads((root / "report.json").read_text()))


def check(killed: Killed) -> None:
    """Every killed run lost nothing beyond the last save and came out bit for bit as the whole one."""
    whole = load_file(killed.root / "whole" / "hf" / "model.safetensors")
    for number, starts in enumerate(killed.starts):
        run = killed.root / f"killed_{number}"
        assert metrics(run) == metrics(killed.root / "whole")
        ours = load_file(run / "hf" / "model.safetensors")
        assert all(torch.equal(ours[name], tensor) for name, tensor in whole.items())
        newest = [start["newest"] for start in starts]
        assert newest == sorted(newest), "a checkpoint that was there is gone"
        # A start that was killed before it had read its checkpoint has told of nothing.
        told = [start["first_step"] for start in json.loads((run / "provenance.json").read_text())["starts"]]
        assert set(told) <= set(newest)
        assert told[-1] == newest[-1]
        assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith((".", "damaged"))]


def test_a_killed_run_ends_as_the_run_that_nobody_killed(tmp_path: Path, tiny_model: Path, launch) -> None:
    killed = kill(tmp_path, tiny_model, launch, num_steps=8, num_kills=4, num_runs=1, most_saves=1, seed=1)
    assert killed.num_kills == 4
    check(killed)


@pytest.mark.soak
def test_twenty_kills_leave_no_trace(tmp_path: Path, tiny_model: Path, launch) -> None:
    killed = kill(tmp_path, tiny_model, launch, num_steps=16, num_kills=24, num_runs=4, most_saves=3, seed=2)
    assert killed.num_kills >= 20
    kills = [start for run in killed.starts for start in run if start["killed"]]
    assert any(start["saving"] for start in kills)
    # Of starts too that had something to lose.
    assert sum(start["newest"] > 0 for start in kills) >= 8
    check(killed)
