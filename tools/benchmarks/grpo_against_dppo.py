"""Train the quickstart by several methods and seeds; print accuracy, tokens and seconds with confidence intervals.

python tools/benchmarks/grpo_against_dppo.py [--methods grpo dppo ...] [--seeds 5] [--runs results/study]

A run whose summary.json is there is not made again.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

METHODS = {
    "grpo": ("dppo.enabled=false",),
    "dppo": (),
    "dppo neyman": ("dppo.completion_pruning.policy=neyman",),
    "dppo surprise": ("dppo.completion_pruning.policy=neyman", "dppo.completion_pruning.score=surprise"),
    "top": ("dppo.prompt_pruning.enabled=false", "dppo.completion_pruning.policy=top"),
    "greso": ("dppo.prompt_pruning.policy=greso", "dppo.completion_pruning.enabled=false"),
}
"""Overrides of the quickstart. Zero advantages are dropped in all of them."""

_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. candidate_tokens: of training on everything, an estimate where prompts are pruned."""

    accuracy: float
    rollout_tokens: float
    train_tokens: float
    candidate_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the half-width of its 95 % confidence interval (Student's t)."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """From one value a seed, two seeds and more."""
        deviation = float(np.std(values, ddof=1)) / math.sqrt(len(values))
        return cls(float(np.mean(values)), _T_95[len(values)] * deviation)

    def text(self, digits: int) -> str:
        """Mean and half-width."""
        return f"{self.mean:,.{digits}f} ± {self.half_width:,.{digits}f}"


def run(overrides: Sequence[str], *, seed: int, config: str, directory: Path) -> Outcome:
    """Train once, unless that was done before, and read what came of it."""
    summary = directory / "summary.json"
    if not summary.is_file():
        command = [sys.executable, "-m", "dppo_megatron", "train", config, *overrides]
        command += [f"grpo.seed={seed}", f"logger.log_dir={directory}", "logger.tensorboard_enabled=false"]
        command += ["checkpointing.enabled=false", "dppo.save_hf=false"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    values = json.loads(summary.read_text())
    return Outcome(
        accuracy=values["accuracy_after"],
        rollout_tokens=values["rollout_tokens"],
        train_tokens=values["train_tokens"],
        candidate_tokens=values["train_tokens_without_pruning"],
        seconds=values["train_seconds"],
    )


def report(outcomes: dict[str, list[Outcome]]) -> str:
    """The table, and each method against the first by paired differences and ratios of the seeds."""
    lines = ["| method | accuracy | rollout tokens | train tokens | seconds |", "|---|---|---|---|---|"]
    for name, runs in outcomes.items():
        cells = [
            Interval.of([one.accuracy for one in runs]).text(3),
            Interval.of([one.rollout_tokens for one in runs]).text(0),
            Interval.of([one.train_tokens for one in runs]).text(0),
            Interval.of([one.seconds for one in runs]).text(1),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    (first, base), *others = outcomes.items()
    lines += [
        "",
        f"| against {first} | accuracy | rollout tokens | train tokens | train tokens over {first}'s rollout tokens |"
        " seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in others:
        pairs = list(zip(runs, base, strict=True))
        cells = [
            Interval.of([a.accuracy - b.accuracy for a, b in pairs]).text(3),
            Interval.of([a.rollout_tokens / b.rollout_tokens for a, b in pairs]).text(3),
            Interval.of([a.train_tokens / b.train_tokens for a, b in pairs]).text(3),
            Interval.of([a.train_tokens / b.rollout_tokens for a, b in pairs]).text(3),
            Interval.of([a.seconds / b.seconds for a, b in pairs]).text(2),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the study; methods alternate within a seed, so that a busy machine slows all of them alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["grpo", "dppo"])
    parser.add_argument("--seeds", type=int, choices=_T_95, default=5)
    parser.add_argument("--config", default="examples/quickstart.yaml")
    parser.add_argument("--runs", type=Path, default=Path("results/study"))
    options = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {name: [] for name in options.methods}
    for seed in range(options.seeds):
        for name, runs in outcomes.items():
            directory = options.runs / f"{name.replace(' ', '_')}_{seed}"
            runs.append(run(METHODS[name], seed=seed, config=options.config, directory=directory))
            print(f"{name}, seed {seed}: {runs[-1]}", file=sys.stderr)
    print(report(outcomes))


if __name__ == "__main__":
    main()
