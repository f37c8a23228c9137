"""What whole runs leave behind, for the table of honoured keys; slower than ``honoured_workshop``."""

import io
import shutil
import sys
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np

from dppo_megatron import checkpoint_evaluation, run_setup, stages
from dppo_megatron.batches import TrainStats
from dppo_megatron.commands.train import _train
from dppo_megatron.config.loader import LoadedConfig
from dppo_megatron.plan import resolve_layout
from dppo_megatron.rl.rewards import MathReward
from dppo_megatron.stop_request import StopRequest
from dppo_megatron.train import run_training
from dppo_megatron.watchdog import Watchdog
from tests.config.honoured_workshop import Workshop


def count_letters(prompt: str, completion: str, answer: str) -> float:
    """A reward that differs within groups, whatever the model says."""
    return float(len(completion))


def trained(shop: Workshop, loaded: LoadedConfig) -> object:
    """Which files a run of one step leaves, and whether it told of a mismatch, or of Weights & Biases."""
    for name in ("logs", "other", "samples"):
        shutil.rmtree(shop.folder / name, ignore_errors=True)
    said, wandb = io.StringIO(), MagicMock()
    layout = resolve_layout(loaded.config.cluster, megatron=loaded.config.policy.megatron_cfg, virtual_pp=1)
    with redirect_stdout(said), patch.dict(sys.modules, {"wandb": wandb}):
        run_training(loaded, layout, command=[])
    shop.lay_out()
    places = [shop.folder / name for name in ("logs", "other", "samples")]
    files = {str(path.relative_to(shop.folder)) for place in places for path in place.rglob("*") if path.is_file()}
    events = any("tfevents" in name for name in files)
    told = wandb.init.call_args and {name: wandb.init.call_args.kwargs[name] for name in ("project", "name")}
    return sorted(name for name in files if "tfevents" not in name), events, "disagree" in said.getvalue(), told


def evaluated(shop: Workshop, loaded: LoadedConfig) -> object:
    """What ``dppo eval`` measures: sets, prompts, samples."""
    layout = resolve_layout(loaded.config.cluster, megatron=loaded.config.policy.megatron_cfg, virtual_pp=1)
    output = shop.folder / "evaluation"
    found = checkpoint_evaluation.run_evaluation(
        loaded, layout, model=str(shop.model), temperature=None, output=output
    )
    shop.lay_out()
    return [(one.name, one.num_prompts, one.num_samples) for one in found]


def stop_time(shop: Workshop, loaded: LoadedConfig) -> object:
    """Whether the run that ``dppo train`` starts would still begin steps of a second, and of an hour."""
    layout = resolve_layout(loaded.config.cluster, megatron=loaded.config.policy.megatron_cfg, virtual_pp=1)
    with patch("dppo_megatron.train.run_training") as run:
        assert _train(loaded, layout, []) == 0
    stop: StopRequest = run.call_args.kwargs["stop"]
    return [stop.leaves_no_time(next_seconds=seconds) for seconds in (1.0, 3600.0)]


def limits(shop: Workshop, loaded: LoadedConfig) -> object:
    """A stage's time limits: the first, and after one of two seconds; and whether a thread watches."""
    watchdog = Watchdog(loaded.config.dppo.watchdog, directory=shop.folder, rank=0)
    times = iter(np.arange(100) * 2000.0)
    with patch("dppo_megatron.watchdog.time.monotonic", lambda: float(next(times))):
        watchdog.watch("a")
        watchdog.watch("b")
        found = [watchdog.limit("z"), watchdog.limit("a")]
    with (
        patch("dppo_megatron.watchdog.threading.Thread") as thread,
        patch("dppo_megatron.watchdog.faulthandler"),
        watchdog,
    ):
        return found, thread.called


def answers(shop: Workshop, loaded: LoadedConfig) -> object:
    """Verdict of the reward on a boxed answer of 40 characters, and the limits of its workers."""
    reward = run_setup.make_reward(
        loaded.config.data.train.env_name, reward=loaded.config.dppo.reward, env=loaded.config.env
    )
    verdict = reward([""], ["\\boxed{" + "1" * 40 + "}"], ["1" * 40]).tolist()
    reward.close()
    owner: Any = reward._answers if isinstance(reward, MathReward) else reward
    return type(reward).__name__, verdict, owner._pool._limits if hasattr(owner, "_pool") else None


def skipped(shop: Workshop, loaded: LoadedConfig) -> object:
    """How many updates in a row may be skipped before the run ends."""
    stats = TrainStats(loss=float("nan"), grad_norm=0.0, learning_rate=0.0, num_tokens=0, metrics=(), skipped=True)
    with shop.run(loaded) as run:
        for count in range(1, 20):
            try:
                run.skipped.note(stats, [], step=count)
            except RuntimeError:
                return count
    raise AssertionError("the run would not end")


def disk_errors(shop: Workshop, loaded: LoadedConfig) -> object:
    """What becomes of a checkpoint that cannot be written."""
    with shop.run(loaded) as run, patch("dppo_megatron.run_state.save_policy", side_effect=OSError("full")):
        try:
            return stages.save_checkpoint(run, 0, None)
        except RuntimeError:
            return "the run ends"


def continuation(shop: Workshop, loaded: LoadedConfig) -> object:
    """Whether a checkpoint of another seed is continued."""
    with shop.run(loaded) as run:
        assert run.state is not None
        try:
            other = {**run.state.fingerprint, "grpo.seed": -1}
            run.state._compare_fingerprint(other, shop.folder, world=shop.mesh.world)
        except ValueError:
            return "refused"
        return "continued"


def vllm_generator(shop: Workshop, loaded: LoadedConfig) -> object:
    """The generator over vLLM's engine, the engine itself left out: type, its limits."""
    with patch.object(run_setup, "VllmEngine"), shop.run(loaded) as run:
        time_limit = getattr(run.generator, "_time_limit_seconds", None)
        return type(run.generator).__name__, time_limit
