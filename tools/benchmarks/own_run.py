"""A run of this project as a benchmark sees it: what it had spent at each validation."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.benchmarks.grpo_task import Point
from tools.benchmarks.timing import spent_at_lines

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = REPOSITORY / "examples" / "quickstart.yaml"
WITHOUT_FILES = ("checkpointing.enabled=false", "dppo.save_hf=false", "logger.tensorboard_enabled=false")

METHODS = {
    "grpo": ("dppo.enabled=false",),
    "dppo": (),
    "dppo neyman": ("dppo.completion_pruning.policy=neyman",),
    "dppo surprise": ("dppo.completion_pruning.policy=neyman", "dppo.completion_pruning.score=surprise"),
    "top": ("dppo.prompt_pruning.enabled=false", "dppo.completion_pruning.policy=top"),
    "greso": ("dppo.prompt_pruning.policy=greso", "dppo.completion_pruning.enabled=false"),
}
"""Overrides of the quickstart. Zero advantages are dropped in all of them."""


def one_thread() -> dict[str, str]:
    """The environment of a trainer that has one thread, and finds this repository's tools."""
    path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def train(overrides: Sequence[str], *, config: Path = QUICKSTART) -> tuple[Point, ...]:
    """Train as a user does, on one thread, and return the validations; start-up and validation are not counted.

    Raises: CalledProcessError.
    """
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "dppo_megatron", "train", str(config), f"logger.log_dir={run}"]
        at_lines = spent_at_lines([*command, *WITHOUT_FILES, *overrides], run / "metrics.jsonl", env=one_thread())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Processor time is known at the ends of steps, and divided over what a step does by wall time.
    spent = at_lines[max(at_lines)][1] - at_lines[min(line for line in at_lines if line)][1]
    rate = spent / sum(line["timing/train/total_step_time"] for line in lines[1:])
    points, seconds, sampled, trained = [], 0.0, 0, 0
    for line in lines:
        outside = line["timing/validation/total_validation_time"] + line["timing/train/checkpointing"]
        seconds += line["timing/train/total_step_time"] - outside
        sampled += line["dppo/rollout_tokens"]
        trained += line["train/global_valid_toks"]
        accuracy = line.get("validation/accuracy")
        if accuracy is not None:
            points.append(Point(line["step"] + 1, accuracy, seconds, rate * seconds, sampled, trained))
    return tuple(points)
