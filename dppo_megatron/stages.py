"""The stages of a step, as verbs on a run: what the loop names, tied to the run's parts."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dppo_megatron import device, metric_names
from dppo_megatron.batches import (
    FinishReason,
    FloatArray,
    IntArray,
    PackedRow,
    PromptBatch,
    PrunedBatch,
    RolloutBatch,
    Sampling,
    ScoredBatch,
    TrainStats,
)
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.exchange import exchange, gather_scores
from dppo_megatron.plan import padding_multiples
from dppo_megatron.rl.advantages import group_advantages
from dppo_megatron.rl.audit import AuditReport, sketch
from dppo_megatron.rl.draws import Draws, hash_parts
from dppo_megatron.rl.evaluation import Evaluation, EvaluationSums, evaluate
from dppo_megatron.rl.merging import merge
from dppo_megatron.rl.packing import PackingReport, plan_rows, report_packing
from dppo_megatron.rl.prompts import count_earlier
from dppo_megatron.rl.pruning import prune_completions, prune_prompts
from dppo_megatron.rl.pruning_report import PruningReport
from dppo_megatron.rl.replay import samples_of, samples_path, write_samples
from dppo_megatron.rl.reward_shaping import shape_rewards
from dppo_megatron.run_records import StepRecord
from dppo_megatron.run_setup import Run
from dppo_megatron.stage_clock import StageSeconds


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimizer step trains on: the plan, this data-parallel rank's rows of it, how dense they are."""

    plan: PrunedBatch
    rows: list[PackedRow]
    packing: PackingReport


class EngineError(RuntimeError):
    """An engine failed on one rank or several; raised on all of them, with what each says."""


def generate(run: Run, share: PromptBatch, draws: Draws, sampling: Sampling) -> RolloutBatch:
    """Completions of this rank's share. Raises EngineError on every rank where the engine of one failed."""
    rollouts, failure = None, ""
    try:
        rollouts = run.generator.generate(share, draws, sampling)
    except RuntimeError as error:
        failure = str(error)
    world = run.mesh.world
    if collectives.sum_array(np.array([float(rollouts is None)]), world)[0]:
        failures = collectives.gather_objects(failure, world)
        raise EngineError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text))
    assert rollouts is not None
    return rollouts


def sample(run: Run, share: PromptBatch, draws: Draws, *, cursor: dict[str, int]) -> RolloutBatch:
    """A step's completions; where an engine fails, a checkpoint of the steps done, then EngineError.

    cursor: the state of the prompts before the step took its candidates.
    """
    try:
        return generate(run, share, draws, run.sampling)
    except EngineError:
        # Nothing but the cursor has moved yet: a restart takes the step again, the same.
        run.prompts.restore(cursor)
        step = draws.step
        saved = run.state is None or step == run.first_step or (run.state.directory / f"step_{step}").exists()
        if not saved:
            publish_checkpoint(run, save_checkpoint(run, step - 1, None))
        raise


def score(run: Run, rollouts: RolloutBatch, kept: PromptBatch) -> ScoredBatch:
    """Reward this rank's completions, compare them within their groups, and gather everybody's scores."""
    rewards = shape_rewards(
        run.score(rollouts),
        completion_lengths=rollouts.completions.lengths,
        finish_reasons=rollouts.finish_reasons,
        grpo=run.config.grpo,
    )
    advantages = group_advantages(rewards.reshape(-1, run.sampling.num_generations), grpo=run.config.grpo)
    return gather_scores(
        rollouts,
        rewards,
        advantages.ravel(),
        kept=kept,
        num_generations=run.sampling.num_generations,
        over=run.mesh.generation,
    )


def complete_groups(
    run: Run, rollouts: RolloutBatch, scores: ScoredBatch, *, draws: Draws
) -> tuple[RolloutBatch, ScoredBatch]:
    """Further rollouts where dynamic sampling wants more groups than these hold; else these as they are."""

    def sample_more(earlier: IntArray) -> tuple[RolloutBatch, ScoredBatch]:
        candidates = run.candidates.next_batch(draws)
        # A prompt that stands in an earlier batch of the step must not get the same completions again.
        occurrences = count_earlier(np.concatenate([earlier, candidates.prompt_ids]))[len(earlier) :]
        candidates = replace(candidates, occurrences=occurrences)
        kept = prune_prompts(candidates, history=run.history, pruning=run.pruning, draws=draws)
        more = generate(run, kept.share(rank=axis.rank, size=axis.size), draws, run.sampling)
        more_scores = score(run, more, kept)
        run.history.record(more_scores)
        return more, more_scores

    axis = run.mesh.generation
    return run.resampling.complete(rollouts, scores, sample_more=sample_more, rank=axis.rank, num_ranks=axis.size)


def record_samples(
    run: Run, step: int, rollouts: RolloutBatch, *, scores: ScoredBatch, plans: Sequence[PrunedBatch]
) -> None:
    """Check that every rank decided alike; write the step's samples where the run records them."""
    digest = 0
    for plan in plans:
        for array in (plan.sequences, plan.weights, plan.keep_probabilities):
            digest = zlib.crc32(array.tobytes(), digest)
    collectives.require_equal(digest, run.mesh.world, what="keep decisions")
    directory = run.config.dppo.rollout.record_dir
    if directory is None:
        return
    mine = samples_of(rollouts, scored=scores, plans=plans, completion_texts=run.decode(rollouts))
    everybody = collectives.gather_objects(mine, run.mesh.generation)
    if run.mesh.world.is_first:
        write_samples(samples_path(Path(directory), step=step), [sample for part in everybody for sample in part])


def pack_rows(run: Run, rollouts: RolloutBatch, scores: ScoredBatch, plan: PrunedBatch) -> MiniBatch:
    """Plan equal shares of rows for all data-parallel ranks, and fetch this rank's sequences into them."""
    policy = run.config.policy
    packing = policy.sequence_packing
    multiples = padding_multiples(run.mesh.layout, sequence_divisor=policy.make_sequence_length_divisible_by)
    rows = plan_rows(
        plan.lengths,
        config=packing,
        window=run.config.dppo.packing.window,
        capacity=packing.train_mb_tokens,
        sequence_multiple=multiples.sequence,
        row_multiple=multiples.row,
        dp_size=run.mesh.dp.size,
        attention_weight=run.inputs.architecture.attention_weight,
    )
    packed = exchange(
        rollouts,
        plan,
        rows,
        scores=scores,
        token_level_loss=run.config.loss_fn.token_level_loss or run.config.dppo.denominator == "constant",
        mesh=run.mesh,
    )
    return MiniBatch(plan, packed, report_packing(rows, lengths=plan.lengths, capacity=packing.train_mb_tokens))


def attach_logprobs(run: Run, batch: MiniBatch) -> MiniBatch:
    """Old log-probs where an earlier mini-batch will have moved the policy, the reference's where KL is penalised."""
    off_policy = run.num_minibatches > 1 and not run.config.loss_fn.force_on_policy_ratio
    rows = run.policy.attach_logprobs(
        batch.rows, old=off_policy, reference=run.reference, temperature=run.sampling.temperature
    )
    return MiniBatch(batch.plan, rows, batch.packing)


def audit(
    run: Run,
    step: int,
    rollouts: RolloutBatch,
    *,
    candidates: PromptBatch,
    scores: ScoredBatch,
    batches: Sequence[MiniBatch],
    draws: Draws,
) -> AuditReport | None:
    """Every ``dppo.audit.period`` steps: the gradient of all candidates and completions beside the estimate.

    Both at the parameters that sampled. It changes neither the training nor the history.
    """
    period = run.config.dppo.audit.period
    if not period or step % period:
        return None
    everything = _everything(run, rollouts, candidates=candidates, scores=scores, draws=draws)
    full = [
        attach_logprobs(run, pack_rows(run, *everything, plan))
        for plan in prune_completions(everything[1], pruning=run.pruning.without_pruning(), draws=draws)
    ]
    return run.audit.add(_sketch(run, batches), full=_sketch(run, full))


def _everything(
    run: Run, rollouts: RolloutBatch, *, candidates: PromptBatch, scores: ScoredBatch, draws: Draws
) -> tuple[RolloutBatch, ScoredBatch]:
    """The step as if no prompt had been pruned: the missing ones are sampled now, all weights are 1."""
    keys, kept_keys = (hash_parts(one.prompt_ids, one.occurrences) for one in (candidates, scores.prompts))
    pruned = candidates.take(np.flatnonzero(~np.isin(keys, kept_keys)))
    whole = replace(scores, prompts=scores.prompts.with_weights(np.ones(len(scores.prompts))))
    if not len(pruned):
        return rollouts, whole
    axis = run.mesh.generation
    rest = run.generator.generate(pruned.share(rank=axis.rank, size=axis.size), draws, run.sampling)
    return merge(
        [(rollouts, whole), (rest, score(run, rest, pruned))],
        num_candidates=candidates.num_candidates,
        num_ranks=axis.size,
    )


def _sketch(run: Run, batches: Sequence[MiniBatch]) -> FloatArray:
    """The sum of the mini-batches' gradients at the present parameters, projected."""
    parts = [
        sketch(
            run.policy.gradients(
                batch.rows, loss=run.loss, denominator=batch.plan.denominator, temperature=run.sampling.temperature
            ),
            seed=run.config.grpo.seed,
        )
        for batch in batches
    ]
    return np.sum(parts, axis=0)


def update(run: Run, batch: MiniBatch) -> TrainStats:
    """One optimizer step, or none where nothing kept has a gradient: the plan tells every rank so."""
    if not run.loss.has_gradient(batch.plan.advantages):
        return run.policy.stay(run.loss)
    stats = run.policy.update(
        batch.rows, loss=run.loss, denominator=batch.plan.denominator, temperature=run.sampling.temperature
    )
    device.synchronize()
    return stats


def validate(run: Run, num_steps_done: int) -> float:
    """Accuracy on the validation prompts under the generator's weights, equal on every rank."""
    assert run.inputs.validation is not None
    axis = run.mesh.generation
    sums = evaluate(
        run.generator,
        prompts=run.inputs.validation.share(rank=axis.rank, size=axis.size),
        draws=Draws(run.config.grpo.seed, num_steps_done),
        sampling=run.validation_sampling,
        score=run.score,
    )
    total = EvaluationSums.from_array(collectives.sum_array(sums.to_array(), axis))
    return Evaluation.from_sums(total).accuracy


def save_checkpoint(run: Run, step: int, accuracy: float | None) -> Path | None:
    """Write the checkpoint of the steps up to ``step``; it shows once it is published. None where it could not be."""
    assert run.state is not None
    return run.state.save(
        run.policy, prompts=run.prompts, history=run.history, num_steps_done=step + 1, metric=accuracy
    )


def publish_checkpoint(run: Run, pending: Path) -> None:
    """Let a checkpoint show, after its step was logged: a run that dies in between takes the step again."""
    assert run.state is not None
    run.state.publish(pending, world=run.mesh.world)


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
        metric_names.REWARD_FAILURES: float(run.reward.num_failures),
        metric_names.IDLE_UPDATES: float(sum(one.idle for one in stats)),
        metric_names.ROWS: float(sum(batch.packing.num_rows for batch in batches)),
        metric_names.TOKEN_DENSITY: _mean([batch.packing.density for batch in batches]),
        metric_names.TOKEN_IMBALANCE: _mean([batch.packing.token_imbalance for batch in batches]),
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
        extra=tuple((losses | rest | _audit_metrics(audited)).items()),
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


def _mean(values: Sequence[float] | FloatArray | np.ndarray, *, weights: FloatArray | None = None) -> float:
    if not len(values):
        return 0.0
    return float(
        np.average(np.asarray(values, np.float64), weights=weights if weights is None or weights.any() else None)
    )
