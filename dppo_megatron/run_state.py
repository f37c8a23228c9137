"""What a run must keep to continue as if it had not stopped: policy, optimizer, data cursor, history, step.

A checkpoint is a directory ``step_N`` that appears whole, by one rename. It holds ``policy/`` (megatron-core's
torch_dist format, for any layout), ``history.npz`` and ``run_state.json`` with the fingerprint of the run.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.config.schema import CheckpointingConfig, GresoConfig
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.checkpoint import load_policy, save_policy
from dppo_megatron.parallel.mesh import Axis
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.prompts import Prompts

_NAME = re.compile(r"step_(\d+)")
_FREE = (
    "logger.",
    "checkpointing.",
    "cluster.",
    "policy.megatron_cfg.",
    "policy.sequence_packing.",
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
    "dppo.save_hf",
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
    """Where a run continues: steps done before, and the prompt history of then."""

    num_steps_done: int
    history: PromptHistory


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's checkpoints, and the fingerprint that ties them to it."""

    config: CheckpointingConfig
    fingerprint: dict[str, Any]

    @property
    def directory(self) -> Path:
        """Where checkpoints lie."""
        return Path(self.config.checkpoint_dir)

    def save(
        self, policy: Policy, *, prompts: Prompts, history: PromptHistory, num_steps_done: int, metric: float | None
    ) -> Path:
        """Write a checkpoint, not yet visible; called by every rank. Returns what ``publish`` takes."""
        pending = self.directory / f".step_{num_steps_done}.incomplete"
        world = policy.mesh.world
        if world.is_first:
            shutil.rmtree(pending, ignore_errors=True)
            (pending / "policy").mkdir(parents=True)
        collectives.barrier(world)
        save_policy(policy, pending / "policy", with_optimizer=self.config.save_optimizer)
        if world.is_first:
            np.savez(pending / "history.npz", **history.state())  # type: ignore[arg-type]
            state = {
                "num_steps_done": num_steps_done,
                "num_updates": policy.num_updates,
                "metric": metric,
                "prompts": prompts.state(),
                "with_optimizer": self.config.save_optimizer,
                "fingerprint": self.fingerprint,
            }
            (pending / "run_state.json").write_text(json.dumps(state, indent=2))
        return pending

    def publish(self, pending: Path, *, world: Axis) -> None:
        """Make a checkpoint visible, and delete those that ``keep_top_k`` no longer keeps; called by every rank."""
        if world.is_first:
            final = pending.with_name(pending.name.removeprefix(".").removesuffix(".incomplete"))
            shutil.rmtree(final, ignore_errors=True)
            pending.replace(final)
            self._delete_surplus()
        collectives.barrier(world)

    def _delete_surplus(self) -> None:
        # The newest stays, to resume from; beside it the best, and where there is no metric the newest.
        if self.config.keep_top_k is None:
            return
        sign = 1 if self.config.higher_is_better else -1
        ranked = []
        for number, path in _checkpoints(self.directory).items():
            metric = json.loads((path / "run_state.json").read_text())["metric"]
            ranked.append((float("-inf") if metric is None else sign * metric, number, path))
        newest = max(ranked, key=lambda entry: entry[1])
        best = sorted(ranked, reverse=True)[: self.config.keep_top_k]
        for entry in ranked:
            if entry is not newest and entry not in best:
                shutil.rmtree(entry[2])

    def restore(
        self, policy: Policy, *, prompts: Prompts, ema_decay: float, greso: GresoConfig | None
    ) -> Resumed | None:
        """Continue from the newest checkpoint, or None where there is none; called by every rank.

        Raises ValueError naming what differs when the checkpoint is another run's.
        """
        checkpoints = _checkpoints(self.directory)
        if not checkpoints:
            return None
        newest = checkpoints[max(checkpoints)]
        state = json.loads((newest / "run_state.json").read_text())
        theirs, ours = state["fingerprint"], json.loads(json.dumps(self.fingerprint))
        if different := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
            lines = [f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} here" for key in different]
            raise ValueError(
                f"checkpointing.checkpoint_dir: {newest} belongs to another run, or what is trained has changed "
                "since; name another directory, or undo:\n  " + "\n  ".join(lines)
            )
        if not state["with_optimizer"]:
            raise ValueError(f"{newest} was saved without the optimizer (checkpointing.save_optimizer: false)")
        load_policy(policy, newest / "policy")
        policy.continue_schedule(state["num_updates"])
        prompts.restore(state["prompts"])
        with np.load(newest / "history.npz") as arrays:
            history = PromptHistory.from_state(dict(arrays), ema_decay=ema_decay, greso=greso)
        return Resumed(state["num_steps_done"], history)


def _checkpoints(directory: Path) -> dict[int, Path]:
    if not directory.is_dir():
        return {}
    named = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in named if match}
