"""Train the quickstart by several methods and seeds; print accuracy, tokens and seconds with confidence intervals.

python -m tools.benchmarks.grpo_against_dppo [--methods grpo dppo ...] [--seeds 5] [--target 0.8]

Processor seconds of one thread, without start-up and validation. A run whose validations are kept in --runs is not
made again.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tools.benchmarks.own_run import METHODS, QUICKSTART, train
from tools.benchmarks.study import SEEDS, Interval, Run, all_spent_until, collect, ratio

VALIDATION_PERIOD = 5


def run(overrides: Sequence[str], config: Path, seed: int) -> Run:
    """Train by a method."""
    return train([*overrides, f"grpo.seed={seed}", f"grpo.val_period={VALIDATION_PERIOD}"], config=config)


def report(runs: Mapping[str, Sequence[Run]], *, target: float) -> str:
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
        ends, base_ends = [points[-1] for points in seeds], [points[-1] for points in base]
        pairs = list(zip(ends, base_ends, strict=True))
        reached = all_spent_until(seeds, target), all_spent_until(base, target)
        intervals = [
            Interval.of([a.accuracy - b.accuracy for a, b in pairs]),
            ratio(ends, base_ends, "sampled_tokens"),
            ratio(ends, base_ends, "trained_tokens"),
            Interval.of([a.trained_tokens / b.sampled_tokens for a, b in pairs]),
            ratio(ends, base_ends, "processor_seconds"),
            *(ratio(*reached, name) for name in ("step", "sampled_tokens", "trained_tokens", "processor_seconds")),
        ]
        lines.append(f"| {name} | {' | '.join(interval.text(3) for interval in intervals)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["grpo", "dppo", "dppo surprise"])
    parser.add_argument("--seeds", type=int, choices=SEEDS, default=5)
    parser.add_argument("--target", type=float, default=0.8, help="accuracy, for what it took to get there")
    parser.add_argument("--config", type=Path, default=QUICKSTART)
    parser.add_argument("--runs", type=Path, default=Path("results/study"), help="keeps each run's validations")
    options = parser.parse_args()
    trainers = {name: partial(run, METHODS[name], options.config) for name in options.methods}
    runs = collect(trainers, settings={"config": options.config}, seeds=options.seeds, kept=options.runs)
    print(report(runs, target=options.target))


if __name__ == "__main__":
    main()
