"""The loop: every rank runs these lines, in step with the others."""

import sys
from collections.abc import Sequence
from pathlib import Path

from dppo_megatron.config.loader import LoadedConfig
from dppo_megatron.mismatch import MismatchWatch
from dppo_megatron.parallel.hf_export import save_hf
from dppo_megatron.parallel.mesh import open_mesh
from dppo_megatron.plan import Layout
from dppo_megatron.provenance import write_provenance
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.pruning import prune_completions, prune_prompts
from dppo_megatron.run_log import RunLog, SilentLog
from dppo_megatron.run_setup import Run, read_inputs, set_up
from dppo_megatron.stage_clock import StageClock
from dppo_megatron.stages import (
    attach_logprobs,
    audit,
    complete_groups,
    pack_rows,
    publish_checkpoint,
    record_samples,
    sample,
    save_checkpoint,
    score,
    step_record,
    update,
    validate,
)


def train(run: Run, log: RunLog | SilentLog) -> None:
    """Take the run's remaining steps; log each."""
    policy, generator, mesh = run.policy, run.generator, run.mesh
    generator.load_weights(policy.hf_weights(), version=run.first_step)
    if run.validates_before(run.first_step):
        log.baseline(validate(run, run.first_step))
    clock, mismatch = StageClock(), MismatchWatch(run.config.dppo.rollout.mismatch_warning)
    for step in range(run.first_step, run.num_steps):
        draws, cursor = Draws(run.config.grpo.seed, step), run.prompts.state()
        candidates = run.candidates.next_batch(draws)
        with clock.stage("pruning"):
            kept = prune_prompts(candidates, history=run.history, pruning=run.pruning, draws=draws)
        with clock.stage("rollout"):
            share = kept.share(rank=mesh.generation.rank, size=mesh.generation.size)
            rollouts = sample(run, share, draws, cursor=cursor)
        with clock.stage("reward"):
            scores = score(run, rollouts, kept)
            run.history.record(scores)
        with clock.stage("rollout"):
            rollouts, scores = complete_groups(run, rollouts, scores, draws=draws)
        with clock.stage("pruning"):
            plans = prune_completions(scores, pruning=run.pruning, draws=draws)
            record_samples(run, step, rollouts, scores=scores, plans=plans)
        with clock.stage("packing"):
            batches = [pack_rows(run, rollouts, scores, plan) for plan in plans]
        with clock.stage("logprobs"):
            # All before the first update: the old log-probs are those of the policy that sampled.
            batches = [attach_logprobs(run, batch) for batch in batches]
        audited = audit(run, step, rollouts, candidates=candidates, scores=scores, batches=batches, draws=draws)
        with clock.stage("update"):
            stats = [update(run, batch) for batch in batches]
        with clock.stage("weight_sync"):
            generator.load_weights(policy.hf_weights(), version=step + 1)
        with clock.stage("validation"):
            accuracy = validate(run, step + 1) if run.validates_after(step) else None
        with clock.stage("checkpoint"):
            checkpoint = save_checkpoint(run, step, accuracy) if run.saves_after(step) else None
        seconds = clock.step_seconds()
        record = step_record(run, step, scores, batches, stats, audited=audited, accuracy=accuracy, seconds=seconds)
        log.step(record)
        if note := mismatch.note(record):
            log.note(note)
        if checkpoint is not None:
            publish_checkpoint(run, checkpoint)


def run_training(loaded: LoadedConfig, layout: Layout, *, command: Sequence[str]) -> None:
    """Join the run's processes, train from where its checkpoints stand, and leave a summary and the model.

    Raises ValueError for what the user has to mend, RuntimeError for a run that broke.
    """
    config, directory = loaded.config, Path(loaded.config.logger.log_dir)
    inputs = read_inputs(config)
    with (
        open_mesh(layout, seed=config.grpo.seed) as mesh,
        set_up(loaded, inputs, mesh) as run,
        _open_log(run, directory) as log,
    ):
        if mesh.world.is_first:
            write_provenance(
                directory,
                config=loaded.effective,
                command=command,
                first_step=run.first_step,
                world_size=layout.world_size,
                tensor_parallel=layout.tp,
                pipeline_parallel=layout.pp,
                context_parallel=layout.cp,
            )
        for note in run.notes():
            log.note(note)
        log.resume_from(run.first_step)
        train(run, log)
        if config.dppo.save_hf:
            save_hf(run.policy, directory / "hf")
        log.summary()


def _open_log(run: Run, directory: Path) -> RunLog | SilentLog:
    if not run.mesh.world.is_first:
        return SilentLog()
    return RunLog(
        directory,
        num_steps=run.num_steps,
        tensorboard=run.config.logger.tensorboard_enabled,
        console=sys.stdout,
    )
