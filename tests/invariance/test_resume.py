"""A run that stops and continues is the run that never stopped, on its layout bit for bit."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from run_jobs import WORKER, job, metrics, write_prompts
from safetensors.torch import load_file

from dppo_megatron import metric_names
from dppo_megatron.checkpoint_files import find_checkpoints

SHARDED = ("policy.megatron_cfg.optimizer.use_distributed_optimizer=true",)
TP2 = ("cluster.gpus_per_node=2", "policy.megatron_cfg.tensor_model_parallel_size=2")
VIRTUAL = (
    "cluster.gpus_per_node=2",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
    "dppo.virtual_pipeline_stages=2",
)
UNREWARDED = ("dppo.reward.function=partial_credit:nothing",)
DP2 = ("cluster.gpus_per_node=2",)
AUDITED = ("dppo.audit.period=2",)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, deep_model: Path, launch) -> Path:
    root = tmp_path_factory.mktemp("resume")
    write_prompts(tiny_model, root)

    def jobs(name: str, *num_steps: int, extra: tuple[str, ...] = (), model: Path = tiny_model) -> list[list[str]]:
        return [job(model, root / name, num_steps=number, extra=extra) for number in num_steps]

    recorded = (f"dppo.rollout.record_dir={root / 'whole'}",)
    replayed = (f"dppo.rollout.replay_dir={root / 'whole'}", "grpo.val_at_start=false")
    deep_recorded = (f"dppo.rollout.record_dir={root / 'deep'}",)
    deep_replayed = (f"dppo.rollout.replay_dir={root / 'deep'}", "grpo.val_at_start=false")
    first = [
        *jobs("whole", 6, extra=(*recorded, *AUDITED)),
        *jobs("halves", 3, 6, extra=AUDITED),
        *jobs("sharded", 4, extra=SHARDED),
        *jobs("sharded_halves", 2, 4, extra=SHARDED),
        *jobs("untrained", 2, 3, extra=UNREWARDED),
        *jobs("sharded_untrained", 2, 3, extra=(*UNREWARDED, *SHARDED)),
        *jobs("deep", 6, extra=deep_recorded, model=deep_model),
        *jobs("one_then_virtual", 4, extra=deep_replayed, model=deep_model),
    ]
    launch(WORKER, json.dumps(first), num_processes=1)
    second = [
        *jobs("tp2_then_dp2", 4, extra=(*replayed, *TP2)),
        *jobs("tp2_then_dp2", 6, extra=(*replayed, *DP2)),
        *jobs("dp2_then_one", 4, extra=(*replayed, *DP2, *SHARDED)),
        *jobs("virtual", 4, extra=(*VIRTUAL, *SHARDED), model=deep_model),
        *jobs("virtual_halves", 2, 4, extra=(*VIRTUAL, *SHARDED), model=deep_model),
        *jobs("virtual_then_one", 4, extra=(*deep_replayed, *VIRTUAL), model=deep_model),
        *jobs("one_then_virtual", 6, extra=(*deep_replayed, *VIRTUAL), model=deep_model),
    ]
    launch(WORKER, json.dumps(second), num_processes=2)
    third = [
        *jobs("dp2_then_one", 6, extra=(*replayed, *SHARDED)),
        *jobs("virtual_then_one", 6, extra=deep_replayed, model=deep_model),
    ]
    launch(WORKER, json.dumps(third), num_processes=1)
    return root


@pytest.mark.parametrize(
    ("whole", "halves"), [("whole", "halves"), ("sharded", "sharded_halves"), ("virtual", "virtual_halves")]
)
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(whole: str, halves: str, root: Path) -> None:
    assert metrics(root / halves) == metrics(root / whole)
    ours, theirs = (load_file(root / name / "hf" / "model.safetensors") for name in (halves, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_audit_s_running_means_go_on_where_they_stood(root: Path) -> None:
    # Steps 0, 2 and 4 are audited; the run was resumed after three steps.
    ours, theirs = metrics(root / "halves")[4], metrics(root / "whole")[4]
    for name in (metric_names.AUDIT_MEAN_COSINE, metric_names.AUDIT_MEAN_ERROR, metric_names.AUDIT_STANDARD_ERROR):
        assert ours[name] == theirs[name]


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("tp2_then_dp2", "whole"),
        ("dp2_then_one", "whole"),
        ("virtual_then_one", "deep"),
        ("one_then_virtual", "deep"),
    ],
)
def test_a_run_resumed_on_another_layout_is_the_same_run_up_to_rounding(name: str, whole: str, root: Path) -> None:
    # Both replay the whole run's samples: what differs is arithmetic alone.
    ours, theirs = metrics(root / name), metrics(root / whole)
    assert len(ours) == len(theirs) == 6
    assert [start["first_step"] for start in starts_of(root / name)] == [0, 4]
    for key in (metric_names.LOSS, metric_names.GRAD_NORM):
        np.testing.assert_allclose([line[key] for line in ours], [line[key] for line in theirs], rtol=2e-2, atol=1e-4)
    mine, other = (load_file(root / run / "hf" / "model.safetensors") for run in (name, whole))
    for key, tensor in other.items():
        assert float((mine[key] - tensor).norm() / tensor.norm()) < 1e-3, key


@pytest.mark.parametrize("name", ["untrained", "sharded_untrained"])
def test_a_checkpoint_from_before_any_step_has_trained_is_continued(name: str, root: Path) -> None:
    assert [line[metric_names.IDLE_UPDATES] for line in metrics(root / name)] == [1, 1, 1]


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


def train(command: list[str], *, largest_file: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``dppo train``; a file that would grow beyond ``largest_file`` bytes cannot be written."""

    def limit() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    path = os.pathsep.join([str(WORKER.parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "dppo_megatron", "train", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=240,
        check=False,
        preexec_fn=limit,
    )


WANDB = """
import json
from pathlib import Path
from types import SimpleNamespace

def init(**settings):
    with (Path(__file__).parent / "inits.jsonl").open("a") as file:
        file.write(json.dumps({"id": settings["id"], "resume": settings["resume"]}) + "\\n")
    return SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
"""


def test_a_run_that_continues_in_another_directory_is_still_the_one_at_weights_and_biases(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_prompts(tiny_model, tmp_path)
    package = tmp_path / "fake_wandb"
    package.mkdir()
    (package / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]))
    sent = ("logger.wandb_enabled=true", f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}")
    # The start in between sends nothing there, and must not make the last one another run.
    for name, num_steps, extra in (("sent", 2, sent), ("silent", 4, sent[1:]), ("sent_on", 6, sent)):
        result = train(job(tiny_model, tmp_path / name, num_steps=num_steps, extra=extra))
        assert result.returncode == 0, result.stderr
    inits = [json.loads(line) for line in (package / "inits.jsonl").read_text().splitlines()]
    assert len(inits) == 2
    assert inits[0] == inits[1] == {"id": (tmp_path / "sent" / "wandb_id.txt").read_text(), "resume": "allow"}


def starts_of(run: Path) -> list[dict[str, int]]:
    """What provenance.json says of the run's starts."""
    return json.loads((run / "provenance.json").read_text())["starts"]


def copy_of(run: Path, name: str) -> Path:
    """A copy of a run to spoil."""
    shutil.copytree(run, run.with_name(name))
    return run.with_name(name)


def test_a_checkpoint_of_another_run_is_refused_by_name_and_accepted_by_name(root: Path, tiny_model: Path) -> None:
    run, changed = copy_of(root / "halves", "accepted"), ("loss_fn.ratio_clip_max=0.3", "loss_fn.ratio_clip_min=0.1")
    accept_one = "dppo.checkpoint.accept_changed=[loss_fn.ratio_clip_min]"
    result = train(job(tiny_model, run, num_steps=8, extra=(*changed, accept_one)))
    assert result.returncode == 2, result.stderr
    assert "loss_fn.ratio_clip_max: 0.2 there, 0.3 here" in result.stderr
    assert "ratio_clip_min: 0.2 there" not in result.stderr
    assert "Traceback" not in result.stderr

    accept_both = "dppo.checkpoint.accept_changed=[loss_fn.ratio_clip_min, loss_fn.ratio_clip_max]"
    result = train(job(tiny_model, run, num_steps=8, extra=(*changed, accept_both)))
    assert result.returncode == 0, result.stderr
    assert "loss_fn.ratio_clip_max: 0.2 there, 0.3 here" in result.stderr
    assert len(metrics(run)) == 8


def test_an_accepted_change_that_the_checkpoint_cannot_follow_is_one_message(root: Path, tiny_model: Path) -> None:
    key = "policy.megatron_cfg.optimizer.use_distributed_optimizer"
    run, extra = copy_of(root / "halves", "other_optimizer"), (*SHARDED, f"dppo.checkpoint.accept_changed=[{key}]")
    result = train(job(tiny_model, run, num_steps=8, extra=extra))
    assert result.returncode == 2, result.stderr
    assert key in result.stderr.split("dppo: error: ")[1]
    assert "Traceback" not in result.stderr


def test_a_damaged_checkpoint_is_set_aside_loudly_and_the_one_before_it_used(root: Path, tiny_model: Path) -> None:
    run = copy_of(root / "halves", "damaged")  # audited, as the run that never stopped
    shards = sorted((run / "checkpoints" / "step_6" / "policy").glob("*.distcp"))
    content = bytearray(shards[0].read_bytes())
    content[len(content) // 2] ^= 1
    shards[0].write_bytes(content)
    result = train(job(tiny_model, run, num_steps=6, extra=AUDITED))
    assert result.returncode == 0, result.stderr
    assert "step_6 IS DAMAGED" in result.stderr
    assert f"policy/{shards[0].name}" in result.stderr
    assert (run / "checkpoints" / "damaged_step_6").is_dir()
    # Steps 5 and 6 were taken again, and came out as before.
    assert metrics(run) == metrics(root / "whole")
    assert starts_of(run)[-1]["first_step"] == 4


@pytest.mark.parametrize("on_write_error", ["stop", "continue"])
def test_a_full_disk_keeps_the_last_good_checkpoint(on_write_error: str, root: Path, tiny_model: Path) -> None:
    run = root / f"full_{on_write_error}"
    extra = (f"dppo.checkpoint.on_write_error={on_write_error}", "dppo.save_hf=false")
    shutil.copytree(root / "halves" / "checkpoints" / "step_2", run / "checkpoints" / "step_2")
    result = train(job(tiny_model, run, num_steps=6, extra=extra), largest_file=200_000)
    said = result.stderr + result.stdout  # a run that goes on says it in its log
    assert "cannot be written" in said
    assert "the last good checkpoint stays" in said
    assert "Traceback" not in result.stderr
    assert [*find_checkpoints(run / "checkpoints")] == [2]
    assert not [path for path in (run / "checkpoints").iterdir() if path.name != "step_2"]
    assert result.returncode == (1 if on_write_error == "stop" else 0), result.stderr
    # Continuing, the run makes all of its steps: 2 are in the checkpoint, 4 follow.
    assert len(metrics(run)) == (1 if on_write_error == "stop" else 4)
