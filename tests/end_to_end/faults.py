"""Runs that something happens to: started as a user starts them, watched through their files."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"

REWARD = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent

def score(prompt, completion, answer):
    # Slow where a test asks for it, so that it can act meanwhile.
    if (HERE / "slow").exists():
        (HERE / "in_reward").touch()
        time.sleep(120)
    right = sum(mine == theirs for mine, theirs in zip(completion, answer))
    return right / max(len(completion), len(answer))
"""


def job(model: Path, run: Path, *overrides: str) -> list[str]:
    """Configuration and overrides of a short quickstart that writes a checkpoint every two steps."""
    return [
        str(QUICKSTART),
        f"policy.model_name={model}",
        f"logger.log_dir={run}",
        "logger.tensorboard_enabled=false",
        "grpo.max_num_steps=6",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "grpo.num_prompts_per_step=8",
        "policy.train_global_batch_size=64",
        "checkpointing.save_period=2",
        "checkpointing.keep_top_k=null",
        "dppo.reward.function=fault_reward:score",
        "dppo.reward.time_limit_seconds=200",
        *overrides,
    ]


class FaultyRun:
    """A run under way, in a process of its own."""

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        (directory / "fault_reward.py").write_text(REWARD)
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self.directory = directory
        self.output = directory / "output.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dppo_megatron", "train", *arguments],
                cwd=directory,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                # A shell has its background jobs ignore this signal, and what they start inherits that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The ranks end by themselves once their launcher is gone.
        self.process.kill()
        self.process.wait()

    def wait_until(self, holds: Callable[[], bool], *, what: str, seconds: float = 240.0) -> None:
        """Wait until something holds; fail with the run's output where the run ends first."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"the run ended before {what}: {self.output.read_text()}"
            assert time.monotonic() < deadline, f"no {what} in {seconds} s: {self.output.read_text()}"
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        """Process ids of the ranks that the launcher started, by rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send one rank a signal."""
        os.kill(self.ranks()[rank], number)

    def end(self, *, seconds: float = 240.0) -> int:
        """Wait for the end; the exit code."""
        return self.process.wait(seconds)

    @property
    def said(self) -> str:
        """What the run printed."""
        return self.output.read_text()


def num_steps_logged(run: Path) -> int:
    """Steps in metrics.jsonl."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
