"""The stages of a step, as verbs on a run: what the loop names, tied to the run's parts."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from dppo_megatron.batches import (
    FloatArray,
    IntArray,
    PackedRow,
    PromptBatch,
    PrunedBatch,
    Purpose,
    RolloutBatch,
    RowPlan,
    Sampling,
    ScoredBatch,
    TrainStats,
)
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.exchange import exchange, gather_scores
from dppo_megatron.parallel.regrouping import lengths_in, regroup
from dppo_megatron.plan import padding_multiples, rows_multiple, token_alignment
from dppo_megatron.rl.advantages import group_advantages
from dppo_megatron.rl.audit import AuditReport, sketch
from dppo_megatron.rl.draws import Draws, hash_parts
from dppo_megatron.rl.evaluation import Evaluation, EvaluationSums
from dppo_megatron.rl.generator import NonFiniteLogitsError
from dppo_megatron.rl.merging import merge
from dppo_megatron.rl.packing import PackingReport, plan_rows, report_packing
from dppo_megatron.rl.prompts import count_earlier
from dppo_megatron.rl.pruning import prune_completions, prune_prompts
from dppo_megatron.rl.replay import samples_of, samples_path, write_samples
from dppo_megatron.rl.reward_shaping import shape_rewards
from dppo_megatron.run_setup import Run
from dppo_megatron.stop_request import Stopped

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimizer step trains on: the plan, this data-parallel rank's rows of it, how dense they are."""

    plan: PrunedBatch
    rows: list[PackedRow]
    packing: PackingReport


@dataclass(frozen=True, slots=True)
class StepStart:
    """Where a step that is abandoned goes back to. ``prompts``: the stream's state before its candidates."""

    step: int
    prompts: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Failure:
    """What an engine says of its failure; bad_weights: any engine would fail under them."""

    text: str
    bad_weights: bool


class EngineError(RuntimeError):
    """An engine failed on one rank or several; raised on all of them, with what each says."""

    def __init__(self, failures: Sequence[_Failure | None]) -> None:
        """failures: each rank's, None where it has completions."""
        said = (f"rank {rank}: {failure.text}" for rank, failure in enumerate(failures) if failure is not None)
        super().__init__("; ".join(said))
        self.bad_weights = any(failure.bad_weights for failure in failures if failure is not None)


def sample(run: Run, share: PromptBatch, draws: Draws, *, start: StepStart) -> RolloutBatch:
    """This rank's completions. Raises Stopped on every rank where one was asked to stop meanwhile.

    Where an engine fails: a checkpoint of the steps done, save of weights that cannot be sampled from, then
    EngineError on every rank.
    """
    work = partial(_completions, run, share, draws, run.sampling)
    # The ranks of a vLLM engine communicate as they sample: none may leave the others.
    outcome = _or_abandon(run, start, work, interruptible=not run.has_vllm)
    try:
        return _agreed(run, outcome)
    except EngineError as error:
        run.prompts.restore(start.prompts)
        if not error.bad_weights:
            save_stopped(run, Stopped("an engine failed", num_steps_done=start.step))
        raise


def _completions(run: Run, share: PromptBatch, draws: Draws, sampling: Sampling) -> RolloutBatch | _Failure:
    try:
        with run.room_for_rollouts():
            return run.generator.generate(share, draws, sampling)
    except RuntimeError as error:
        return _Failure(str(error), bad_weights=isinstance(error, NonFiniteLogitsError))


def _agreed(run: Run, outcome: RolloutBatch | _Failure) -> RolloutBatch:
    """This rank's completions, where every rank has its own. Raises EngineError on every rank where not."""
    failure = outcome if isinstance(outcome, _Failure) else None
    if collectives.any_rank(failure is not None, run.mesh.world):
        raise EngineError(collectives.gather_objects(failure, run.mesh.world))
    assert not isinstance(outcome, _Failure)
    return outcome


def _or_abandon(run: Run, start: StepStart, work: Callable[[], T], *, interruptible: bool = True) -> T:
    # Nothing but the cursor of the prompts has moved yet: the step is taken again, the same, after the restart.
    result = run.stop.attempt(work) if interruptible else work()
    if collectives.any_rank(run.stop.signalled, run.mesh.world) or result is None:
        run.prompts.restore(start.prompts)
        raise Stopped(run.stop.reason, num_steps_done=start.step)
    return result


def leave_if_asked(run: Run, step: int, *, slowest_seconds: float) -> None:
    """After a step: raise Stopped on every rank where one was asked to stop, or where the time is up.

    slowest_seconds: of a step so far, its checkpoint included.
    """
    asked = run.stop.signalled or run.stop.leaves_no_time(next_seconds=slowest_seconds)
    if collectives.any_rank(asked, run.mesh.world) and step + 1 < run.num_steps:
        raise Stopped(run.stop.reason, num_steps_done=step + 1)


def save_stopped(run: Run, stopped: Stopped) -> Stopped:
    """Save what a stopped run has done since its last checkpoint; called by every rank."""
    if run.state is None:
        return stopped
    checkpoint = run.state.path(stopped.num_steps_done)
    if stopped.num_steps_done > run.first_step and not run.saves_after(stopped.num_steps_done - 1):
        pending = save_checkpoint(run, stopped.num_steps_done - 1, None)
        if pending is None:
            return stopped
        publish_checkpoint(run, pending)
    return Stopped(stopped.reason, num_steps_done=stopped.num_steps_done, checkpoint=checkpoint)


def score(run: Run, rollouts: RolloutBatch, kept: PromptBatch, *, start: StepStart | None = None) -> ScoredBatch:
    """Reward this rank's completions, compare them within their groups, and gather everybody's scores.

    start: raise Stopped on every rank where one was asked to stop meanwhile; None where the history already counts
    this step, which must then be finished.
    """
    rewards = run.score(rollouts) if start is None else _or_abandon(run, start, partial(run.score, rollouts))
    rewards = shape_rewards(
        rewards,
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
        num_failures=run.reward.num_failures,
        over=run.mesh.generation,
    )


def complete_groups(
    run: Run, rollouts: RolloutBatch, scores: ScoredBatch, *, draws: Draws, start: StepStart
) -> tuple[RolloutBatch, ScoredBatch]:
    """Further rollouts where dynamic sampling wants more groups than these hold; else these as they are.

    The history learns of all that were scored at the end, when the step can no longer be abandoned.
    """
    visits = [scores]

    def sample_more(earlier: IntArray) -> tuple[RolloutBatch, ScoredBatch]:
        candidates = run.candidates.next_batch(draws)
        # A prompt that stands in an earlier batch of the step must not get the same completions again.
        occurrences = count_earlier(np.concatenate([earlier, candidates.prompt_ids]))[len(earlier) :]
        candidates = replace(candidates, occurrences=occurrences)
        kept = prune_prompts(candidates, history=run.history, pruning=run.pruning, draws=draws)
        more = sample(run, kept.share(rank=axis.rank, size=axis.size), draws, start=start)
        visits.append(score(run, more, kept, start=start))
        return more, visits[-1]

    axis = run.mesh.generation
    completed = run.resampling.complete(
        rollouts, scores, sample_more=sample_more, rank=axis.rank, num_ranks=axis.size
    )
    for visit in visits:
        run.history.record(visit)
    return completed


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
    capacity = run.config.policy.sequence_packing.train_mb_tokens
    rows = _plan(run, plan.lengths, capacity=capacity, dp_size=run.mesh.dp.size)
    packed = exchange(
        rollouts,
        plan,
        rows,
        scores=scores,
        token_level_loss=run.config.loss_fn.token_level_loss or run.config.dppo.denominator == "constant",
        mesh=run.mesh,
    )
    return MiniBatch(plan, packed, report_packing(rows, lengths=plan.lengths, capacity=capacity))


def _plan(run: Run, lengths: IntArray, *, capacity: int, dp_size: int) -> RowPlan:
    policy = run.config.policy
    multiples = padding_multiples(
        run.mesh.layout,
        sequence_divisor=policy.make_sequence_length_divisible_by,
        alignment=token_alignment(policy.megatron_cfg.fp8_cfg),
    )
    return plan_rows(
        lengths,
        config=policy.sequence_packing,
        window=run.config.dppo.packing.window,
        capacity=capacity,
        sequence_multiple=multiples.sequence,
        row_multiple=multiples.row,
        dp_size=dp_size,
        num_rows_multiple=rows_multiple(run.mesh.layout),
        attention_weight=run.inputs.architecture.attention_weight,
    )


def attach_logprobs(run: Run, batch: MiniBatch) -> MiniBatch:
    """Old log-probs where an earlier mini-batch will have moved the policy, the reference's where KL is penalised."""
    old = run.num_minibatches > 1 and not run.config.loss_fn.force_on_policy_ratio
    if not old and run.reference is None:
        return batch
    packing, regrouping = run.config.policy.sequence_packing, None
    if packing.logprob_mb_tokens != packing.train_mb_tokens:
        plan = _plan(run, lengths_in(batch.rows), capacity=packing.logprob_mb_tokens, dp_size=1)
        regrouping = regroup(batch.rows, plan, cp_size=run.mesh.cp.size)
    rows = run.policy.attach_logprobs(
        batch.rows, old=old, reference=run.reference, temperature=run.sampling.temperature, regrouping=regrouping
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
    with run.room_for_rollouts():
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


def update(run: Run, batch: MiniBatch, *, step: int) -> TrainStats:
    """One optimizer step; none where nothing kept has a gradient (the plan tells every rank) or one is not finite."""
    if not run.loss.has_gradient(batch.plan.advantages):
        return run.policy.stay(run.loss)
    stats = run.policy.update(
        batch.rows, loss=run.loss, denominator=batch.plan.denominator, temperature=run.sampling.temperature
    )
    run.skipped.note(stats, batch.rows, step=step)
    return stats


def validate(run: Run, num_steps_done: int) -> float:
    """Accuracy on the validation prompts under the generator's weights, equal on every rank.

    Where an engine fails: EngineError on every rank.
    """
    assert run.inputs.validation is not None
    axis, sampling = run.mesh.generation, run.validation_sampling
    assert sampling.purpose is Purpose.VALIDATION, "validation has its own random stream"
    share = run.inputs.validation.share(rank=axis.rank, size=axis.size)
    rollouts = _agreed(run, _completions(run, share, Draws(run.config.grpo.seed, num_steps_done), sampling))
    sums = EvaluationSums.of(rollouts, run.score(rollouts), num_generations=sampling.num_generations)
    total = EvaluationSums.from_array(collectives.sum_array(sums.to_array(), axis))
    return Evaluation.from_sums(total).accuracy


def try_to_validate(run: Run, num_steps_done: int) -> float | EngineError:
    """The accuracy, or the failure, which is to be raised once the step before it is saved and logged."""
    try:
        return validate(run, num_steps_done)
    except EngineError as error:
        return error


def is_saved(run: Run, step: int, failure: EngineError | None) -> bool:
    """Whether a checkpoint follows a step: where one is due, and before an engine's failure ends the run.

    Never of weights that cannot be sampled from: it would take the place of a good one.
    """
    return run.saves_after(step) if failure is None else not failure.bad_weights


def save_checkpoint(run: Run, step: int, accuracy: float | None) -> Path | None:
    """Write the checkpoint of the steps up to ``step``; it shows once it is published. None where it could not be."""
    if run.state is None:
        return None
    metric = accuracy if run.config.checkpointing.metric_name is not None else None
    return run.state.save(
        run.policy,
        prompts=run.prompts,
        history=run.history,
        audit=run.audit,
        num_steps_done=step + 1,
        metric=metric,
        wandb_id=run.wandb_id,
    )


def publish_checkpoint(run: Run, pending: Path) -> None:
    """Let a checkpoint show, after its step was logged: a run that dies in between takes the step again."""
    assert run.state is not None
    run.state.publish(pending, world=run.mesh.world)
