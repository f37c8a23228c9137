"""What the log says of a step, put together from what its stages left."""

from collections.abc import Sequence

import numpy as np

from dppo_megatron import device, metric_names
from dppo_megatron.batches import FinishReason, FloatArray, ScoredBatch, TrainStats
from dppo_megatron.performance import StepPerformance
from dppo_megatron.rl.audit import AuditReport
from dppo_megatron.rl.packing import PackingReport
from dppo_megatron.rl.pruning_report import PruningReport
from dppo_megatron.run_records import StepRecord
from dppo_megatron.run_setup import Run
from dppo_megatron.stage_clock import StageSeconds
from dppo_megatron.stages import MiniBatch


def step_record(
    run: Run,
    step: int,
    scores: ScoredBatch,
    batches: Sequence[MiniBatch],
    stats: Sequence[TrainStats],
    *,
    audited: AuditReport | None,
    accuracy: float | None,
    seconds: StageSeconds,
) -> StepRecord:
    """What the log says of a step: sums and means over its mini-batches."""
    report = PruningReport.of(scores, plans=tuple(batch.plan for batch in batches))
    performance = _performance(run, batches, rollout_tokens=report.num_tokens_generated, seconds=seconds)
    tokens = np.array([one.num_tokens for one in stats], np.float64)
    losses = {
        metric_names.LOSS_METRICS[name]: _mean([dict(one.metrics)[name] for one in stats], weights=tokens)
        for name in run.loss.metric_names
    }
    rest = {
        metric_names.MEAN_PROMPT_LENGTH: _mean(scores.prompts.tokens.lengths),
        metric_names.MEAN_GENERATED_TOKENS: _mean(scores.completion_lengths),
        metric_names.TRUNCATION_RATE: _mean(scores.finish_reasons == FinishReason.LENGTH),
        metric_names.WEIGHT_MEAN: report.weight_mean,
        metric_names.WEIGHT_MAX: report.weight_max,
        metric_names.EFFECTIVE_SAMPLE_SIZE: report.effective_sample_size,
        metric_names.CANDIDATE_PROMPTS: float(report.num_candidate_prompts),
        metric_names.KEPT_PROMPTS: float(report.num_kept_prompts),
        metric_names.KEPT_COMPLETIONS: float(report.num_kept_completions),
        metric_names.DROPPABLE_COMPLETIONS: float(report.num_droppable_completions),
        metric_names.PROMPT_VARIANCE: report.prompt_variance.per_kept,
        metric_names.PROMPT_VARIANCE_PER_CANDIDATE: report.prompt_variance.per_candidate,
        metric_names.COMPLETION_VARIANCE: report.completion_variance.per_kept,
        metric_names.COMPLETION_VARIANCE_PER_CANDIDATE: report.completion_variance.per_candidate,
        metric_names.TOKENS_SAVED_BY_PROMPTS: report.num_tokens_not_generated,
        metric_names.TOKENS_SAVED_BY_COMPLETIONS: float(report.num_tokens_generated - report.num_tokens_trained),
        metric_names.REWARD_FAILURES: float(scores.num_failures),
        metric_names.IDLE_UPDATES: float(sum(one.idle for one in stats)),
        metric_names.SKIPPED_UPDATES: float(sum(one.skipped for one in stats)),
        **_packing_metrics([batch.packing for batch in batches]),
    }
    return StepRecord(
        step=step,
        reward=_mean(scores.rewards),
        accuracy=accuracy,
        kept_fraction=report.num_kept_completions / max(report.num_completions, 1),
        kept_prompts_fraction=report.num_kept_prompts / report.num_candidate_prompts,
        rollout_tokens=report.num_tokens_generated,
        train_tokens=report.num_tokens_trained,
        train_tokens_without_pruning=round(report.num_tokens_generated + report.num_tokens_not_generated),
        loss=_mean([one.loss for one in stats]),
        grad_norm=_mean([one.grad_norm for one in stats]),
        learning_rate=stats[-1].learning_rate,
        stage_seconds=seconds,
        extra=tuple((losses | rest | performance.metrics() | _audit_metrics(audited)).items()),
    )


def _audit_metrics(report: AuditReport | None) -> dict[str, float]:
    if report is None:
        return {}
    values = {
        metric_names.AUDIT_COSINE: report.cosine,
        metric_names.AUDIT_ERROR: report.relative_error,
        metric_names.AUDIT_MEAN_COSINE: report.mean_cosine,
        metric_names.AUDIT_MEAN_ERROR: report.mean_relative_error,
    }
    if report.standard_error is not None:
        values[metric_names.AUDIT_STANDARD_ERROR] = report.standard_error
    return values


def _packing_metrics(reports: Sequence[PackingReport]) -> dict[str, float]:
    """Sums of rows and padding over the step's mini-batches, means of the rest."""
    return {
        metric_names.ROWS: float(sum(one.num_rows for one in reports)),
        metric_names.PACKED_DENSITY: _mean([one.packed_fill for one in reports]),
        metric_names.SHARED_DENSITY: _mean([one.fill for one in reports]),
        metric_names.TOKEN_DENSITY: _mean([one.density for one in reports]),
        metric_names.SEQUENCE_PADDING: float(sum(one.sequence_padding for one in reports)),
        metric_names.ROW_PADDING: float(sum(one.row_padding for one in reports)),
        metric_names.TOKEN_IMBALANCE: _mean([one.token_imbalance for one in reports]),
        metric_names.ATTENTION_IMBALANCE: _mean([one.attention_imbalance for one in reports]),
    }


def _performance(
    run: Run, batches: Sequence[MiniBatch], *, rollout_tokens: int, seconds: StageSeconds
) -> StepPerformance:
    return StepPerformance.of(
        run.inputs.architecture,
        trained_lengths=np.concatenate([batch.plan.lengths for batch in batches]),
        rollout_tokens=rollout_tokens,
        seconds=seconds,
        num_processes=run.mesh.world.size,
        peak_flops=device.peak_flops(run.config.policy.precision),
    )


def _mean(values: Sequence[float] | FloatArray | np.ndarray, *, weights: FloatArray | None = None) -> float:
    if not len(values):
        return 0.0
    return float(
        np.average(np.asarray(values, np.float64), weights=weights if weights is None or weights.any() else None)
    )
