"""The loop: every rank runs these lines, in step with the others."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dppo_megatron.config.loader import LoadedConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.config_origins import write_origins
from dppo_megatron.mismatch import MismatchWatch
from dppo_megatron.parallel.collectives import barrier
from dppo_megatron.parallel.hf_export import save_hf
from dppo_megatron.parallel.mesh import Mesh, open_mesh
from dppo_megatron.plan import Layout
from dppo_megatron.provenance import write_provenance
from dppo_megatron.report.run_report import write_report
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.pruning import prune_completions, prune_prompts
from dppo_megatron.run_lock import RunLock
from dppo_megatron.run_log import METRICS_FILE, RunLog, SilentLog
from dppo_megatron.run_setup import Run, read_inputs, set_up
from dppo_megatron.stage_clock import StageClock
from dppo_megatron.stages import (
    EngineError,
    StepStart,
    attach_logprobs,
    audit,
    complete_groups,
    is_saved,
    leave_if_asked,
    pack_rows,
    publish_checkpoint,
    record_samples,
    sample,
    save_checkpoint,
    save_stopped,
    score,
    try_to_validate,
    update,
    validate,
)
from dppo_megatron.step_metrics import step_record
from dppo_megatron.stop_request import Stopped, StopRequest
from dppo_megatron.wandb_sink import WandbSink
from dppo_megatron.watchdog import Watchdog


def train(run: Run, log: RunLog | SilentLog, watchdog: Watchdog) -> None:
    """Take the run's remaining steps; log each. Raises Stopped where the run was asked to stop."""
    policy, generator, mesh = run.policy, run.generator, run.mesh
    generator.load_weights(policy.hf_weights(engine_tp=generator.tensor_parallel_size), version=run.first_step)
    if run.validates_before(run.first_step):
        log.baseline(validate(run, run.first_step))
    clock, slowest = StageClock(on_stage=watchdog.watch), 0.0
    fp8_training = run.config.policy.megatron_cfg.fp8_cfg.enabled
    mismatch = MismatchWatch(run.config.dppo.rollout.mismatch_warning, fp8_training=fp8_training)
    for step in range(run.first_step, run.num_steps):
        draws, start = Draws(run.config.grpo.seed, step), StepStart(step, run.prompts.state())
        candidates = run.candidates.next_batch(draws)
        with clock.stage("pruning"):
            kept = prune_prompts(candidates, history=run.history, pruning=run.pruning, draws=draws)
        with clock.stage("rollout"):
            share = kept.share(rank=mesh.generation.rank, size=mesh.generation.size)
            rollouts = sample(run, share, draws, start=start)
        with clock.stage("reward"):
            scores = score(run, rollouts, kept, start=start)
        with clock.stage("rollout"):
            rollouts, scores = complete_groups(run, rollouts, scores, draws=draws, start=start)
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
            stats = [update(run, batch, step=step) for batch in batches]
        with clock.stage("weight_sync"):
            generator.load_weights(policy.hf_weights(engine_tp=generator.tensor_parallel_size), version=step + 1)
        with clock.stage("validation"):
            accuracy = try_to_validate(run, step + 1) if run.validates_after(step) else None
            failure, accuracy = (accuracy, None) if isinstance(accuracy, EngineError) else (None, accuracy)
        with clock.stage("checkpoint"):
            checkpoint = save_checkpoint(run, step, accuracy) if is_saved(run, step, failure) else None
        seconds = clock.step_seconds()
        record = step_record(run, step, scores, batches, stats, audited=audited, accuracy=accuracy, seconds=seconds)
        log.step(record)
        if note := mismatch.note(record):
            log.note(note)
        if checkpoint is not None:
            publish_checkpoint(run, checkpoint)
        if failure is not None:
            raise failure
        slowest = max(slowest, seconds.total)
        leave_if_asked(run, step, slowest_seconds=slowest)


def run_training(
    loaded: LoadedConfig, layout: Layout, *, command: Sequence[str], stop: StopRequest | None = None
) -> None:
    """Join the run's processes, train from where its checkpoints stand, and leave a summary and the model.

    stop: what may end the run early; None for nothing. Raises ValueError for what the user has to mend,
    RuntimeError for a run that broke, Stopped for one that was asked to stop and has saved.
    """
    config, directory = loaded.config, Path(loaded.config.logger.log_dir)
    stop = stop or StopRequest(must_save_by_seconds=None)
    inputs = read_inputs(config)
    with (
        open_mesh(layout, seed=config.grpo.seed) as mesh,
        _lock_directories(config, mesh),
        _open_watchdog(config, mesh) as watchdog,
        set_up(loaded, inputs, mesh, stop=stop) as run,
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
            write_origins(directory, loaded)
        for note in run.notes():
            log.note(note)
        log.resume_from(run.first_step)
        try:
            train(run, log, watchdog)
        except Stopped as stopped:
            watchdog.watch("checkpoint")
            saved = save_stopped(run, stopped)
            _leave_report(directory, mesh, log)
            raise saved from None
        except (KeyboardInterrupt, RuntimeError):
            _leave_report(directory, mesh, log)
            raise
        watchdog.watch("end")
        if config.dppo.save_hf:
            save_hf(run.policy, directory / "hf")
        log.summary()
        _leave_report(directory, mesh, log)


def _leave_report(directory: Path, mesh: Mesh, log: RunLog | SilentLog) -> None:
    """Write the report of the steps that were logged; what prevents it is told and does not end the run."""
    if not mesh.world.is_first or not (directory / METRICS_FILE).is_file():
        return
    try:
        write_report(directory)
    except (OSError, ValueError) as error:
        log.note(f"the report was not written: {error}")


def _lock_directories(config: Config, mesh: Mesh) -> ExitStack:
    """Hold the run's directories, on the first rank; ValueError where another run is there, or none can be."""
    checkpointing = config.checkpointing
    names = [config.logger.log_dir, *([checkpointing.checkpoint_dir] if checkpointing.enabled else [])]
    with ExitStack() as stack:
        for directory in sorted({Path(name).resolve() for name in names}) if mesh.world.is_first else ():
            try:
                stack.enter_context(RunLock(directory))
            except OSError as error:
                what = f"logger.log_dir, checkpointing.checkpoint_dir: {directory} cannot be written ({error})"
                raise ValueError(f"{what}; name another") from error
        return stack.pop_all()


def _open_watchdog(config: Config, mesh: Mesh) -> Watchdog:
    watchdog = Watchdog(config.dppo.watchdog, directory=Path(config.logger.log_dir), rank=mesh.world.rank)
    if mesh.world.is_first:
        watchdog.retire()
    barrier(mesh.world)
    return watchdog


def _open_log(run: Run, directory: Path) -> RunLog | SilentLog:
    if not run.mesh.world.is_first:
        return SilentLog()
    settings, wandb = run.config.logger, None
    if settings.wandb_enabled:
        assert run.wandb_id is not None
        wandb = WandbSink(directory, settings.wandb, run_id=run.wandb_id)
    return RunLog(
        directory,
        num_steps=run.num_steps,
        tensorboard=settings.tensorboard_enabled,
        console=sys.stdout,
        wandb=wandb,
    )
