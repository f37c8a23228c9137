"""What a run must keep to continue as if it had not stopped: policy, optimizer, data cursor, history, audit, step.

A checkpoint is a directory ``step_N`` that appears whole, by one rename, when all of it is on the disk. It holds
``policy/`` (megatron-core's torch_dist format, for any layout), the model's configuration and tokenizer,
``history.npz``, ``audit.npz`` where a step was audited, ``run_state.json`` with the fingerprint of the run, and
``checksums.json``, by which damage is found before anything is loaded.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron import checkpoint_files
from dppo_megatron.checkpoint_files import FileDigest
from dppo_megatron.config.schema import CheckpointingConfig, CheckpointSafetyConfig, GresoConfig
from dppo_megatron.model_source import copy_companions
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.checkpoint import load_policy, save_policy
from dppo_megatron.parallel.mesh import Axis
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.rl.audit import Audit
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.prompts import Prompts

logger = logging.getLogger(__name__)

_FREE = (
    "logger.",
    "checkpointing.",
    "cluster.",
    "policy.megatron_cfg.",
    "policy.sequence_packing.",
    "policy.generation.backend",
    "policy.generation.vllm_cfg.",
    "policy.generation.vllm_kwargs",
    "policy.refit_buffer_size_gb",
    "policy.logprob_chunk_size",
    "policy.model_name",
    "policy.tokenizer.name",
    "grpo.max_num_",
    "grpo.val_",
    "grpo.max_val_samples",
    "data.validation",
    "dppo.rollout.",
    "dppo.packing.",
    "dppo.audit.",
    "dppo.evaluation.",
    "dppo.save_hf",
    "dppo.checkpoint.",
    "dppo.watchdog.",
    "dppo.virtual_pipeline_stages",
    "dppo.max_skipped_updates",
    "env.",
)
"""Keys that may change between a checkpoint and its resumption: they do not decide what is trained. The model
itself is compared by its architecture, its first weights being in the checkpoint."""
_TRAINED = ("policy.megatron_cfg.optimizer.", "policy.megatron_cfg.scheduler.")
"""... save these, which do."""


def fingerprint(effective: Mapping[str, Any], *, architecture: Any, data_digest: int) -> dict[str, Any]:
    """What must be the same for a checkpoint to be continued: dotted keys of the configuration, model and data.

    effective: the resolved configuration. architecture: a dataclass. data_digest: of the training prompts.
    """
    flat = dict(_flatten("", effective))
    kept = {key: value for key, value in flat.items() if key.startswith(_TRAINED) or not key.startswith(_FREE)}
    model = {f"model.{name}": value for name, value in asdict(architecture).items()}
    return {**kept, **model, "data.digest": f"{data_digest:016x}"}


def _flatten(prefix: str, value: Any) -> Any:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flatten(f"{prefix}.{name}" if prefix else str(name), item)
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run continues: steps done before, and what stood then.

    history: the prompts'. audit: the running means. wandb_id: the run's at Weights & Biases.
    """

    num_steps_done: int
    history: PromptHistory
    audit: Audit
    wandb_id: str | None


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's checkpoints, and the fingerprint that ties them to it."""

    config: CheckpointingConfig
    safety: CheckpointSafetyConfig
    fingerprint: dict[str, Any]

    @property
    def directory(self) -> Path:
        """Where checkpoints lie."""
        return Path(self.config.checkpoint_dir)

    def path(self, num_steps_done: int) -> Path:
        """Where the checkpoint after so many steps lies, once it is published."""
        return self.directory / f"step_{num_steps_done}"

    def save(
        self,
        policy: Policy,
        *,
        prompts: Prompts,
        history: PromptHistory,
        audit: Audit,
        num_steps_done: int,
        metric: float | None,
        wandb_id: str | None,
    ) -> Path | None:
        """Write a checkpoint, not yet visible; called by every rank. Returns what ``publish`` takes.

        Where it cannot be written (a full disk), what there is of it is removed and the last good one stays: then
        None under ``dppo.checkpoint.on_write_error: continue``, else RuntimeError, on every rank.
        """
        world = policy.mesh.world
        writer = collectives.gather_objects(os.getpid(), world)[0]
        pending = checkpoint_files.pending_path(self.directory, num_steps_done=num_steps_done, writer=writer)
        state = {
            "num_steps_done": num_steps_done,
            "num_updates": policy.num_updates,
            "metric": metric,
            "prompts": prompts.state(),
            "wandb_id": wandb_id,
            "with_optimizer": self.config.save_optimizer,
            "fingerprint": self.fingerprint,
        }

        def begin() -> None:
            if world.is_first:
                (pending / "policy").mkdir(parents=True)
                copy_companions(policy.source, pending)  # a model that policy.model_name can name
                np.savez(pending / "history.npz", **history.state())  # type: ignore[arg-type]
                if sums := audit.state():
                    np.savez(pending / "audit.npz", **sums)  # type: ignore[arg-type]
                (pending / "run_state.json").write_text(json.dumps(state, indent=2))

        def write() -> None:
            save_policy(policy, pending / "policy", with_optimizer=self.config.save_optimizer)
            digests.extend(checkpoint_files.sync_files(pending, rank=world.rank, size=world.size))

        def seal() -> None:
            if world.is_first:
                checkpoint_files.write_checksums(pending, [digest for part in everybody for digest in part])

        digests: list[FileDigest] = []
        for part in (begin, write):
            if self._fails(_problem_of(part), pending, world=world):
                return None
        everybody = collectives.gather_objects(digests, world)
        return None if self._fails(_problem_of(seal), pending, world=world) else pending

    def _fails(self, problem: str | None, pending: Path, *, world: Axis) -> bool:
        """Whether a rank has a problem: it is said, and what was written goes. Called by every rank."""
        problems = _distinct(collectives.gather_objects(problem, world))
        if not problems:
            return False
        message = (
            f"checkpointing.checkpoint_dir: {pending} cannot be written ({'; '.join(problems)}); "
            f"the last good checkpoint stays"
        )
        if world.is_first:
            shutil.rmtree(pending, ignore_errors=True)
            logger.error("%s", message)
        collectives.barrier(world)
        if self.safety.on_write_error == "stop":
            raise RuntimeError(f"{message}. dppo.checkpoint.on_write_error: continue trains on without it")
        return True

    def publish(self, pending: Path, *, world: Axis) -> None:
        """Make a checkpoint visible, and delete those that ``keep_top_k`` no longer keeps; called by every rank."""
        if world.is_first:
            checkpoint_files.publish(pending)
            self._delete_surplus()
        collectives.barrier(world)

    def _delete_surplus(self) -> None:
        # The newest stays, to resume from; beside it the best, and where there is no metric the newest.
        if self.config.keep_top_k is None:
            return
        sign = 1 if self.config.higher_is_better else -1
        ranked = []
        for number, path in checkpoint_files.find_checkpoints(self.directory).items():
            metric = json.loads((path / "run_state.json").read_text())["metric"]
            ranked.append((float("-inf") if metric is None else sign * metric, number, path))
        newest = max(ranked, key=lambda entry: entry[1])
        best = sorted(ranked, reverse=True)[: self.config.keep_top_k]
        for entry in ranked:
            if entry is not newest and entry not in best:
                checkpoint_files.delete(entry[2])

    def restore(
        self, policy: Policy, *, prompts: Prompts, ema_decay: float, greso: GresoConfig | None
    ) -> Resumed | None:
        """Continue from the newest undamaged checkpoint, or None where there never was one; called by every rank.

        Raises ValueError naming what differs when the checkpoint is another run's, RuntimeError where all are
        damaged.
        """
        newest = self._newest_whole(policy.mesh.world)
        if newest is None:
            return None
        state = json.loads((newest / "run_state.json").read_text())
        self._compare_fingerprint(state["fingerprint"], newest, world=policy.mesh.world)
        if not state["with_optimizer"]:
            raise ValueError(
                f"{newest} was saved without the optimizer (checkpointing.save_optimizer: false); start a new run "
                "from its weights: policy.model_name, with another logger.log_dir and checkpoint_dir"
            )
        load_policy(policy, newest / "policy")
        policy.continue_schedule(state["num_updates"])
        prompts.restore(state["prompts"])
        with np.load(newest / "history.npz") as arrays:
            history = PromptHistory.from_state(dict(arrays), ema_decay=ema_decay, greso=greso)
        audit = Audit()
        if (newest / "audit.npz").is_file():
            with np.load(newest / "audit.npz") as arrays:
                audit = Audit.from_state(dict(arrays))
        return Resumed(state["num_steps_done"], history, audit, state.get("wandb_id"))

    def _newest_whole(self, world: Axis) -> Path | None:
        """The newest checkpoint whose files are as they were written; damaged ones are set aside, loudly."""
        if world.is_first:
            checkpoint_files.sweep(self.directory)
        damaged: list[Path] = []
        checkpoints = checkpoint_files.find_checkpoints(self.directory)
        collectives.barrier(world)  # every rank has listed them before one is set aside
        for _, checkpoint in sorted(checkpoints.items(), reverse=True):
            found = checkpoint_files.find_damage(checkpoint, rank=world.rank, size=world.size)
            problems = _distinct(problem for part in collectives.gather_objects(found, world) for problem in part)
            if not problems:
                return checkpoint
            damaged.append(checkpoint)
            if world.is_first:
                aside = checkpoint_files.set_aside(checkpoint)
                logger.error(
                    "%s IS DAMAGED: %s. It is set aside as %s, and the checkpoint before it is used",
                    checkpoint,
                    "; ".join(problems),
                    aside.name,
                )
        if damaged:
            raise RuntimeError(
                f"checkpointing.checkpoint_dir: every checkpoint in {self.directory} is damaged; restore one from a "
                "backup, or name another directory to start over"
            )
        return None

    def _compare_fingerprint(self, theirs: Mapping[str, Any], checkpoint: Path, *, world: Axis) -> None:
        ours = json.loads(json.dumps(self.fingerprint))
        different = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
        lines = {key: f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here" for key in different}
        if refused := [line for key, line in lines.items() if key not in self.safety.accept_changed]:
            raise ValueError(
                f"checkpointing.checkpoint_dir: {checkpoint} belongs to another run, or what is trained has changed "
                "since; name another directory, undo, or list the keys in dppo.checkpoint.accept_changed:\n  "
                + "\n  ".join(refused)
            )
        if lines and world.is_first:
            logger.warning(
                "%s is continued although what is trained has changed:\n  %s", checkpoint, "\n  ".join(lines.values())
            )


def _problem_of(work: Callable[[], None]) -> str | None:
    try:
        work()
    except OSError as error:
        return str(error)
    return None


def _distinct(problems: Iterable[str | None]) -> list[str]:
    return list(dict.fromkeys(problem for problem in problems if problem is not None))
