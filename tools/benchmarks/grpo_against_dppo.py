"""Train the quickstart by several methods and seeds; print accuracy, tokens and seconds with confidence intervals.

python -m tools.benchmarks.grpo_against_dppo [--methods grpo dppo ...] [--seeds 5] [--target 0.8]

Processor seconds of one thread, without start-up and validation. A run whose validations are kept in --runs is not
made again.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from tools.benchmarks.grpo_task import Point, read_points
from tools.benchmarks.own_run import QUICKSTART, train

VALIDATION_PERIOD = 5

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


def run(overrides: Sequence[str], *, seed: int, config: Path, kept: Path) -> tuple[Point, ...]:
    """The validations of a run, which is made once and kept in a file."""
    if not kept.is_file():
        points = train([*overrides, f"grpo.seed={seed}", f"grpo.val_period={VALIDATION_PERIOD}"], config=config)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([asdict(point) for point in points]))
    return read_points(json.loads(kept.read_text()))


def spent_until(points: Sequence[Point], target: float) -> Point:
    """What a run had spent when it reached an accuracy, between validations linearly.

    Raises: ValueError where it never did.
    """
    later = next((index for index, point in enumerate(points) if point.accuracy >= target), None)
    if later is None:
        best = max(point.accuracy for point in points)
        raise ValueError(f"--target {target}: a run reached {best:.3f} at most; take a lower one")
    after, before = points[later], points[later - 1] if later else Point(0, 0.0, 0.0, 0.0, 0, 0)
    share = (target - before.accuracy) / (after.accuracy - before.accuracy)
    values = ((getattr(before, field.name), getattr(after, field.name)) for field in fields(Point))
    return Point(*(start + share * (end - start) for start, end in values))


def report(runs: dict[str, list[tuple[Point, ...]]], *, target: float) -> str:
    """The table, and each method against the first by paired differences and ratios of the seeds."""
    lines = ["| method | accuracy | rollout tokens | train tokens | processor s |", "|---|---|---|---|---|"]
    for name, seeds in runs.items():
        ends = [points[-1] for points in seeds]
        cells = [
            Interval.of([one.accuracy for one in ends]).text(3),
            Interval.of([one.sampled_tokens for one in ends]).text(0),
            Interval.of([one.trained_tokens for one in ends]).text(0),
            Interval.of([one.processor_seconds for one in ends]).text(1),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    (first, base), *others = runs.items()
    lines += [
        "",
        f"| against {first} | accuracy | rollout tokens | train tokens | train tokens over {first}'s rollout tokens |"
        f" processor s | to {target}: steps | rollout tokens | train tokens | processor s |",
        "|" + "---|" * 10,
    ]
    for name, seeds in others:
        pairs = [(a[-1], b[-1]) for a, b in zip(seeds, base, strict=True)]
        reached = [(spent_until(a, target), spent_until(b, target)) for a, b in zip(seeds, base, strict=True)]
        cells = [
            Interval.of([a.accuracy - b.accuracy for a, b in pairs]).text(3),
            _ratio(pairs, "sampled_tokens"),
            _ratio(pairs, "trained_tokens"),
            Interval.of([a.trained_tokens / b.sampled_tokens for a, b in pairs]).text(3),
            _ratio(pairs, "processor_seconds"),
            _ratio(reached, "step"),
            _ratio(reached, "sampled_tokens"),
            _ratio(reached, "trained_tokens"),
            _ratio(reached, "processor_seconds"),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(pairs: Sequence[tuple[Point, Point]], name: str) -> str:
    return Interval.of([getattr(a, name) / getattr(b, name) for a, b in pairs]).text(3)


def main() -> None:
    """Run the study; methods alternate within a seed, so that a busy machine slows all of them alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["grpo", "dppo", "dppo surprise"])
    parser.add_argument("--seeds", type=int, choices=_T_95, default=5)
    parser.add_argument("--target", type=float, default=0.8, help="accuracy, for what it took to get there")
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--runs", type=Path, default=Path("results/study"), help="keeps each run's validations")
    options = parser.parse_args()
    runs: dict[str, list[tuple[Point, ...]]] = {name: [] for name in options.methods}
    for seed in range(options.seeds):
        for name, seeds in runs.items():
            kept = options.runs / f"{name.replace(' ', '_')}_{seed}.json"
            seeds.append(run(METHODS[name], seed=seed, config=options.config, kept=kept))
            print(f"{name}, seed {seed}: {seeds[-1][-1]}", file=sys.stderr)
    print(report(runs, target=options.target))


if __name__ == "__main__":
    main()
