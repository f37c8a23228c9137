"""A run that stops and continues is the run that never stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
WORKER = Path(__file__).with_name("run_worker.py")


def job(model: Path, run: Path, *, num_steps: int, extra: tuple[str, ...] = ()) -> list[str]:
    """A short quickstart that saves every two steps and prunes prompts too."""
    return [
        str(QUICKSTART),
        f"policy.model_name={model}",
        f"logger.log_dir={run}",
        f"data.train.data_path={run.parent}/train.jsonl",
        f"grpo.max_num_steps={num_steps}",
        "checkpointing.save_period=2",
        "checkpointing.keep_top_k=null",
        "grpo.val_period=2",
        "grpo.val_at_end=false",  # the run that stops half-way would validate where the whole one does not
        "grpo.max_val_samples=8",
        "dppo.prompt_pruning.enabled=true",
        "dppo.prompt_pruning.rate=0.3",
        "dppo.reward.function=partial_credit:score",
        "logger.tensorboard_enabled=false",
        *extra,
    ]


def metrics(run: Path) -> list[dict[str, float]]:
    """What metrics.jsonl says, without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("timing/")} for line in lines]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, launch) -> Path:
    root = tmp_path_factory.mktemp("resume")
    # Few prompts, so that pruning by history begins within the run.
    rows = (tiny_model / "data" / "train.jsonl").read_text().splitlines()[:48]
    (root / "train.jsonl").write_text("\n".join(rows))
    whole, halves = root / "whole", root / "halves"
    sharded = ("policy.megatron_cfg.optimizer.use_distributed_optimizer=true",)
    launch(
        WORKER,
        json.dumps(
            [
                job(tiny_model, whole, num_steps=6),
                job(tiny_model, halves, num_steps=3),
                job(tiny_model, halves, num_steps=6),
                job(tiny_model, root / "sharded", num_steps=4, extra=sharded),
                job(tiny_model, root / "sharded_halves", num_steps=2, extra=sharded),
                job(tiny_model, root / "sharded_halves", num_steps=4, extra=sharded),
            ]
        ),
        num_processes=1,
    )
    return root


@pytest.mark.parametrize(("whole", "halves"), [("whole", "halves"), ("sharded", "sharded_halves")])
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(whole: str, halves: str, root: Path) -> None:
    assert metrics(root / halves) == metrics(root / whole)
    ours, theirs = (load_file(root / name / "hf" / "model.safetensors") for name in (halves, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_summary_covers_all_starts(root: Path) -> None:
    summary = json.loads((root / "halves" / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["accuracy_before"] is not None
    for name in ("rollout_tokens", "train_tokens", "train_tokens_without_pruning", "train_seconds"):
        assert summary[name] > 0
    assert summary["train_tokens"] < summary["train_tokens_without_pruning"]


def test_no_half_written_checkpoint_is_left(root: Path) -> None:
    names = sorted(path.name for path in (root / "whole" / "checkpoints").iterdir())
    assert names == ["step_2", "step_4", "step_6"]


def test_a_checkpoint_of_another_run_is_refused_by_name(root: Path, tiny_model: Path) -> None:
    command = job(tiny_model, root / "halves", num_steps=8, extra=("grpo.seed=1", "loss_fn.ratio_clip_max=0.3"))
    result = subprocess.run(
        [sys.executable, "-m", "dppo_megatron", "train", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        timeout=120,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "grpo.seed: 0 there, 1 here" in result.stderr
    assert "loss_fn.ratio_clip_max: 0.2 there, 0.3 here" in result.stderr
    assert "Traceback" not in result.stderr
