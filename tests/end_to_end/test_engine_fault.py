"""An engine that fails on one rank ends the run on all of them, and loses no step that was done."""

import json
from collections.abc import Callable
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
WORKER = Path(__file__).with_name("engine_fault_worker.py")


def test_every_rank_hears_of_a_failed_engine_and_the_restart_takes_that_step_again(
    tiny_model: Path, tmp_path: Path, launch: Callable[..., None]
) -> None:
    launch(
        WORKER,
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
        "dppo.reward.function=partial_credit:score",  # so that every step trains
        num_processes=2,
    )
    checkpoints = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert checkpoints == {"step_3", "step_4", "step_5"}
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_3" / "run_state.json").read_text())
    assert state["prompts"]["cursor"] == 3 * 8
