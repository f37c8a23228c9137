"""Runs against each other: what each needed to reach an accuracy, and in what they were set up differently."""

from collections.abc import Sequence
from dataclasses import dataclass

from dppo_megatron import metric_names
from dppo_megatron.report.charts import Series
from dppo_megatron.report.run_data import RunData

ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run has spent up to a step. seconds: without validation and checkpoints. Tokens: of completions."""

    steps: int = 0
    rollout_tokens: int = 0
    train_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Sampled and trained tokens together."""
        return self.rollout_tokens + self.train_tokens


@dataclass(frozen=True, slots=True)
class Validation:
    """An accuracy, and what it had cost until then."""

    accuracy: float
    spent: Spent


@dataclass(frozen=True, slots=True)
class Difference:
    """A key of the configuration that the runs do not share. values: one a run."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side.

    target: the accuracy to reach. reached: what each run had spent at the first validation at or above it, None
    where it never was.
    """

    runs: tuple[RunData, ...]
    names: tuple[str, ...]
    target: float | None
    reached: tuple[Spent | None, ...]
    differences: tuple[Difference, ...]


def compare(runs: Sequence[RunData], *, target: float | None = None) -> Comparison:
    """Put runs side by side; the target is by default the highest accuracy that all of them reached.

    Raises: ValueError for fewer than two runs, and for a target outside 0 .. 1.
    """
    if len(runs) < 2:
        raise ValueError(f"RUN: {len(runs)} given; comparing takes two or more")
    if target is not None and not 0 <= target <= 1:
        raise ValueError(f"--target: {target}; allowed: 0 to 1")
    measured = [validations(run) for run in runs]
    if target is None and all(measured):
        target = min(max(one.accuracy for one in found) for found in measured)
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.directory) for run in runs]
    return Comparison(
        runs=tuple(runs),
        names=tuple(names),
        target=target,
        reached=tuple(None if target is None else _reach(found, target) for found in measured),
        differences=_differences(runs),
    )


def progress(run: RunData) -> list[Spent]:
    """What was spent after each step."""
    spent, progress = Spent(), []
    for record in run.steps:
        spent = Spent(
            steps=record.step + 1,
            rollout_tokens=spent.rollout_tokens + record.rollout_tokens,
            train_tokens=spent.train_tokens + record.train_tokens,
            seconds=spent.seconds + record.stage_seconds.training,
        )
        progress.append(spent)
    return progress


def validations(run: RunData) -> list[Validation]:
    """Every validation of a run, the one before training first."""
    found = []
    for record, spent in zip(run.steps, progress(run), strict=True):
        before = dict(record.extra).get(metric_names.ACCURACY_BEFORE)
        if before is not None:
            found.append(Validation(before, Spent()))
        if record.accuracy is not None:
            found.append(Validation(record.accuracy, spent))
    return found


def accuracy_over(run: RunData, field: str, *, name: str) -> Series:
    """Validation accuracy over a field of ``Spent``."""
    found = validations(run)
    return Series(
        name,
        tuple(float(getattr(one.spent, field)) for one in found),
        tuple(one.accuracy for one in found),
        dots=True,
    )


def _reach(found: Sequence[Validation], target: float) -> Spent | None:
    return next((one.spent for one in found if one.accuracy >= target), None)


def _differences(runs: Sequence[RunData]) -> tuple[Difference, ...]:
    keys = dict.fromkeys(one.key for run in runs for one in run.settings)
    rows = (Difference(key, tuple(run.setting(key) or ABSENT for run in runs)) for key in keys)
    return tuple(row for row in rows if len(set(row.values)) > 1)
