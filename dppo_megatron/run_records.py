"""What a run tells of itself: a step, the totals over its steps, the summary."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dppo_megatron import metric_names
from dppo_megatron.stage_clock import StageSeconds


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step of the loop did.

    step: the loop's, from 0. reward: mean over the sampled completions. accuracy: of the validation after
    this step, None where none was run. kept_fraction: completions trained on / sampled.
    kept_prompts_fraction: prompts sampled for / candidates. rollout_tokens: completion tokens sampled.
    train_tokens: completion tokens trained on. train_tokens_without_pruning: the same, had neither prompts nor
    completions been dropped; an estimate where prompts were, whose completions nobody knows.
    extra: further (metric name, value), names of metric_names.
    """

    step: int
    reward: float
    accuracy: float | None
    kept_fraction: float
    kept_prompts_fraction: float
    rollout_tokens: int
    train_tokens: int
    train_tokens_without_pruning: int
    loss: float
    grad_norm: float
    learning_rate: float
    stage_seconds: StageSeconds
    extra: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        assert self.step >= 0
        names = [name for name, _ in self.extra]
        assert not _FIXED_NAMES & set(names), f"extra repeats {sorted(_FIXED_NAMES & set(names))}"
        assert len(set(names)) == len(names), f"a name stands twice in extra: {names}"

    def metrics(self) -> dict[str, float]:
        """Values by logged name; no accuracy where no validation was run."""
        values: dict[str, float] = {name: getattr(self, attribute) for attribute, name in _NAMES.items()}
        if self.accuracy is not None:
            values[metric_names.ACCURACY] = self.accuracy
        values[metric_names.STEP_SECONDS] = self.stage_seconds.total
        seconds = (value for _, value in self.stage_seconds.items())
        values |= zip(metric_names.STAGE_SECONDS, seconds, strict=True)
        return values | dict(self.extra)

    def to_json(self) -> str:
        """The step's line of metrics.jsonl, without a newline; a value that is not finite is null."""
        line: dict[str, float | None] = {"step": self.step}
        for name, value in self.metrics().items():
            line[name] = value if math.isfinite(value) else None
        # The default: numpy's scalars are numbers too.
        return json.dumps(line, allow_nan=False, default=lambda number: number.item())

    @classmethod
    def from_json(cls, line: str) -> "StepRecord":
        """The step of a line of metrics.jsonl; null comes back as NaN.

        Raises: ValueError where the line is not JSON or lacks a field.
        """
        values: dict[str, Any] = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError(f"a step must be a JSON object, got {line!r}")
        required = ("step", *_NAMES.values(), *metric_names.STAGE_SECONDS)
        missing = [name for name in required if name not in values]
        if missing:
            raise ValueError(f"a step lacks {', '.join(missing)}")
        values = {name: math.nan if value is None else value for name, value in values.items()}
        return cls(
            step=values["step"],
            accuracy=values.get(metric_names.ACCURACY),
            stage_seconds=StageSeconds(*(values[name] for name in metric_names.STAGE_SECONDS)),
            extra=tuple((name, value) for name, value in values.items() if name not in _FIXED_NAMES),
            **{attribute: values[name] for attribute, name in _NAMES.items()},
        )


_NAMES = {
    "reward": metric_names.REWARD,
    "loss": metric_names.LOSS,
    "grad_norm": metric_names.GRAD_NORM,
    "learning_rate": metric_names.LEARNING_RATE,
    "kept_fraction": metric_names.KEPT_FRACTION,
    "kept_prompts_fraction": metric_names.KEPT_PROMPTS_FRACTION,
    "rollout_tokens": metric_names.ROLLOUT_TOKENS,
    "train_tokens": metric_names.TRAIN_TOKENS,
    "train_tokens_without_pruning": metric_names.TRAIN_TOKENS_WITHOUT_PRUNING,
}
_FIXED_NAMES = frozenset(
    {"step", metric_names.ACCURACY, metric_names.STEP_SECONDS, *_NAMES.values(), *metric_names.STAGE_SECONDS}
)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the steps of a run, over its restarts too.

    kept, kept_prompts: sums of the steps' fractions. non_finite: values that were logged as null.
    accuracy_before, accuracy_after: the first and the last validation, None where there was none.
    """

    steps: int = 0
    rollout_tokens: int = 0
    train_tokens: int = 0
    train_tokens_without_pruning: int = 0
    kept: float = 0.0
    kept_prompts: float = 0.0
    non_finite: int = 0
    stage_seconds: StageSeconds = field(default_factory=StageSeconds)
    accuracy_before: float | None = None
    accuracy_after: float | None = None

    def with_step(self, record: StepRecord) -> "Totals":
        """The totals with one more step."""
        before = dict(record.extra).get(metric_names.ACCURACY_BEFORE, self.accuracy_before)
        return replace(
            self,
            steps=self.steps + 1,
            rollout_tokens=self.rollout_tokens + record.rollout_tokens,
            train_tokens=self.train_tokens + record.train_tokens,
            train_tokens_without_pruning=self.train_tokens_without_pruning + record.train_tokens_without_pruning,
            kept=self.kept + record.kept_fraction,
            kept_prompts=self.kept_prompts + record.kept_prompts_fraction,
            non_finite=self.non_finite + sum(not math.isfinite(v) for v in record.metrics().values()),
            stage_seconds=self.stage_seconds + record.stage_seconds,
            accuracy_before=before,
            accuracy_after=self.accuracy_after if record.accuracy is None else record.accuracy,
        )


@dataclass(frozen=True, slots=True)
class SummaryRecord:
    """What a run came to: the fields of summary.json.

    train_seconds: wall seconds of the steps without validation and checkpoints. Fractions lie in 0 .. 1:
    the saved ones are 1 - tokens / train_tokens_without_pruning, which is what would have been sampled as well;
    the dropped ones are means over the steps. All are zero where there was no step.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    steps: int
    rollout_tokens: int
    train_tokens: int
    train_tokens_without_pruning: int
    rollout_tokens_saved_fraction: float
    train_tokens_saved_fraction: float
    completions_dropped_fraction: float
    prompts_dropped_fraction: float
    train_seconds: float
    stage_seconds: StageSeconds
    stage_shares: StageSeconds
    non_finite: int
    run_directory: str

    @classmethod
    def from_totals(cls, totals: Totals, *, run_directory: str) -> "SummaryRecord":
        """The summary of a run's totals."""
        full = totals.train_tokens_without_pruning
        return cls(
            accuracy_before=totals.accuracy_before,
            accuracy_after=totals.accuracy_after,
            steps=totals.steps,
            rollout_tokens=totals.rollout_tokens,
            train_tokens=totals.train_tokens,
            train_tokens_without_pruning=full,
            rollout_tokens_saved_fraction=1 - totals.rollout_tokens / full if full else 0.0,
            train_tokens_saved_fraction=1 - totals.train_tokens / full if full else 0.0,
            completions_dropped_fraction=1 - totals.kept / totals.steps if totals.steps else 0.0,
            prompts_dropped_fraction=1 - totals.kept_prompts / totals.steps if totals.steps else 0.0,
            train_seconds=totals.stage_seconds.training,
            stage_seconds=totals.stage_seconds,
            stage_shares=totals.stage_seconds.shares(),
            non_finite=totals.non_finite,
            run_directory=run_directory,
        )

    def to_json(self) -> str:
        """summary.json's text; a value that is not finite is null."""
        values = asdict(self)
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        return json.dumps(values, indent=2, allow_nan=False) + "\n"
