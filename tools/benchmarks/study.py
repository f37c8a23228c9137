"""Trainers compared over seeds: runs that are kept in files, what they had spent at an accuracy, and intervals."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from tools.benchmarks.grpo_task import Point, read_points

Run = tuple[Point, ...]
"""The validations of a run, in order."""

_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
SEEDS = (1, *_T_95)
"""How many seeds a study may have."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the half-width of its 95 % confidence interval (Student's t); None of a single seed."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """From one value a seed."""
        mean = float(np.mean(values))
        if len(values) == 1:
            return cls(mean, None)
        return cls(mean, _T_95[len(values)] * float(np.std(values, ddof=1)) / math.sqrt(len(values)))

    def text(self, digits: int) -> str:
        """Mean and half-width."""
        mean = f"{self.mean:,.{digits}f}"
        return mean if self.half_width is None else f"{mean} ± {self.half_width:,.{digits}f}"


def collect(
    trainers: Mapping[str, Callable[[int], Run]], *, settings: Mapping[str, Any], seeds: int, kept: Path
) -> dict[str, list[Run]]:
    """Every trainer's runs, one a seed. Each is made once and kept, under its name and seed.

    Trainers alternate within a seed, so that a busy machine slows all of them alike.
    Raises: ValueError where a kept run was of other settings.
    """
    settings = json.loads(json.dumps(settings, default=str))
    runs: dict[str, list[Run]] = {name: [] for name in trainers}
    kept.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        for name, train in trainers.items():
            file = kept / f"{name.replace(' ', '_')}_{seed}.json"
            if not file.is_file():
                points = [asdict(point) for point in train(seed)]
                file.write_text(json.dumps({"settings": settings, "validations": points}))
            found = json.loads(file.read_text())
            if found["settings"] != settings:
                raise ValueError(
                    f"{file} is of other settings: {found['settings']}; give another directory as --runs"
                )
            runs[name].append(read_points(found["validations"]))
            print(f"{name}, seed {seed}: {runs[name][-1][-1]}", file=sys.stderr)
    return runs


def spent_until(points: Run, target: float) -> Point | None:
    """What a run had spent when it reached an accuracy, between validations linearly; None where it never did."""
    later = next((index for index, point in enumerate(points) if point.accuracy >= target), None)
    if later is None:
        return None
    after, before = points[later], points[later - 1] if later else Point(0, 0.0, 0.0, 0.0, 0, 0)
    share = (target - before.accuracy) / (after.accuracy - before.accuracy)
    values = ((getattr(before, field.name), getattr(after, field.name)) for field in fields(Point))
    return Point(*(start + share * (end - start) for start, end in values))


def all_spent_until(runs: Sequence[Run], target: float) -> list[Point]:
    """The same of every seed.

    Raises: ValueError where one never reached it.
    """
    reached = [point for point in (spent_until(points, target) for points in runs) if point is not None]
    if len(reached) < len(runs):
        best = min(max(point.accuracy for point in points) for points in runs)
        raise ValueError(f"--target {target}: a run reached {best:.3f} at most; take a lower one")
    return reached


def ratio(first: Sequence[Point], second: Sequence[Point], name: str) -> Interval:
    """Of one of a Point's figures, seed by seed."""
    return Interval.of([getattr(a, name) / getattr(b, name) for a, b in zip(first, second, strict=True)])
