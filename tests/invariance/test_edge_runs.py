"""Runs with hardly anything to train on: no rank divides by zero, and no step is made of nothing."""

import json
from pathlib import Path

import pytest
import torch
from run_jobs import WORKER, job, metrics
from safetensors.torch import load_file

from dppo_megatron import metric_names

DP2 = ("cluster.gpus_per_node=2", "checkpointing.enabled=false")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, launch) -> Path:
    root = tmp_path_factory.mktemp("edges")
    rows = (tiny_model / "data" / "train.jsonl").read_text().splitlines()
    (root / "train.jsonl").write_text("\n".join(rows[:4]))
    small = (
        "grpo.num_generations_per_prompt=2",
        "grpo.max_num_epochs=100",
        "grpo.val_at_start=false",
        "grpo.val_period=0",
        *DP2,
    )
    # Two candidates a step for two ranks, each kept with one half: a rank often has no prompt, sometimes both.
    few = (
        "grpo.num_prompts_per_step=2",
        "policy.train_global_batch_size=4",
        "dppo.prompt_pruning.policy=uniform",
        "dppo.prompt_pruning.rate=0.6",
        "dppo.sampler=bernoulli",
        "dppo.completion_pruning.policy=uniform",
        *small,
    )
    same = (
        "grpo.num_prompts_per_step=4",
        "policy.train_global_batch_size=4",  # two optimizer steps a rollout batch
        "dppo.reward.function=partial_credit:same",
        *small,
    )
    jobs = [
        job(tiny_model, root / "few", num_steps=12, extra=few),
        job(tiny_model, root / "same", num_steps=3, extra=same),
    ]
    launch(WORKER, json.dumps(jobs), num_processes=2)
    return root


def test_where_every_advantage_is_zero_no_step_is_taken_and_it_is_counted(root: Path, tiny_model: Path) -> None:
    lines = metrics(root / "same")
    assert [line[metric_names.IDLE_UPDATES] for line in lines] == [2.0] * 3
    assert all(line[metric_names.TRAIN_TOKENS] == line[metric_names.GRAD_NORM] == 0 for line in lines)
    trained = load_file(root / "same" / "hf" / "model.safetensors")
    first = load_file(tiny_model / "model.safetensors")
    assert all(torch.equal(trained[name], tensor) for name, tensor in first.items())


def test_ranks_without_prompts_and_steps_without_any_go_by(root: Path) -> None:
    lines = metrics(root / "few")
    assert len(lines) == 12
    kept = [line[metric_names.KEPT_PROMPTS_FRACTION] for line in lines]
    assert {0.0, 0.5} <= set(kept), "the seed makes no step that is pruned whole: choose another"
    for line, fraction in zip(lines, kept, strict=True):
        assert fraction > 0 or line[metric_names.IDLE_UPDATES] == 1
    assert any(line[metric_names.IDLE_UPDATES] == 0 for line in lines)


def test_nothing_is_divided_by_zero(root: Path) -> None:
    for name in ("few", "same"):
        for line in metrics(root / name):
            assert not [key for key, value in line.items() if value is None]
