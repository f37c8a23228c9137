"""An engine that fails on one rank ends the run on all of them, and loses no step that was done."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
WORKER = Path(__file__).with_name("engine_fault_worker.py")


PARTIAL = ("dppo.reward.function=partial_credit:score",)  # so that every step trains
DYNAMIC = (  # and takes several batches
    "dppo.reward.function=partial_credit:seldom",
    "grpo.use_dynamic_sampling=true",
    "grpo.dynamic_sampling_max_gen_batches=40",
)


@pytest.mark.parametrize(("fatal_call", "extra"), [("1", PARTIAL), ("2", DYNAMIC)], ids=["rollouts", "further"])
def test_every_rank_hears_of_a_failed_engine_and_the_restart_takes_that_step_again(
    tiny_model: Path, tmp_path: Path, launch: Callable[..., None], fatal_call: str, extra: tuple[str, ...]
) -> None:
    launch(
        WORKER,
        fatal_call,
        QUICKSTART,
        f"policy.model_name={tiny_model}",
        f"logger.log_dir={tmp_path}/run",
        "cluster.gpus_per_node=2",
        "grpo.max_num_steps=5",
        "grpo.num_prompts_per_step=8",
        "policy.train_global_batch_size=64",
        "checkpointing.save_period=5",
        "checkpointing.keep_top_k=null",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "grpo.val_period=4",
        "grpo.max_val_samples=4",
        *extra,
        num_processes=2,
    )
    checkpoints = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert checkpoints == {"step_3", "step_4", "step_5"}
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_3" / "run_state.json").read_text())
    # The worker compares the prompts of the step that is taken again.
    assert state["prompts"]["cursor"] == 3 * 8 if extra is PARTIAL else state["prompts"]["cursor"] > 3 * 8


@pytest.mark.parametrize(("fails_in", "val_period", "save_period"), [("rollouts", 0, 5), ("validation", 1, 1)])
def test_weights_that_cannot_be_sampled_from_take_no_good_checkpoint_s_place(
    tiny_model: Path, tmp_path: Path, fails_in: str, val_period: int, save_period: int
) -> None:
    overrides = (
        f"policy.model_name={tiny_model}",
        f"logger.log_dir={tmp_path}",
        "grpo.num_prompts_per_step=8",
        "policy.train_global_batch_size=64",
        "policy.megatron_cfg.optimizer.lr=1e18",  # finite weights, infinite logits
        "policy.megatron_cfg.scheduler.lr_warmup_init=1e18",
        "grpo.val_at_start=false",
        "grpo.max_val_samples=4",
        f"grpo.val_period={val_period}",
        f"checkpointing.save_period={save_period}",
        "dppo.reward.function=partial_credit:score",
    )
    done = subprocess.run(
        [sys.executable, "-m", "dppo_megatron", "train", str(QUICKSTART), *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "logits are not finite (weights of version 1)" in done.stderr
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1, fails_in
    assert not list((tmp_path / "checkpoints").glob("step_*"))
