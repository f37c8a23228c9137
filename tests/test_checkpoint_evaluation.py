"""``dppo eval`` on a model as the quickstart leaves it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dppo_megatron.checkpoint_evaluation import EvaluatedSample, dataset_configs, figures
from dppo_megatron.config.loader import load_config

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
SIX = Path(__file__).parents[1] / "examples" / "evaluation.yaml"


def a_sample(prompt: int, index: int, *, extracted: str | None, reward: float) -> EvaluatedSample:
    return EvaluatedSample(prompt, 0, index, "?", "4", "...", extracted, reward, "stop", 3)


def test_figures_count_right_samples_and_votes_prompt_by_prompt() -> None:
    answers = [("4", 1.0), ("5", 0.0), ("5 ", 0.0), ("4", 1.0), ("5", 0.0), ("4", 1.0), (" 5", 0.0), (None, 0.0)]
    samples = [a_sample(i // 4, i % 4, extracted=text, reward=reward) for i, (text, reward) in enumerate(answers)]
    found = figures("d", samples, num_samples=4)
    values = {k: one.value for k, one in found.passes}
    assert values[1] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert values[2] == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert values[4] == 1.0
    assert [(k, one.value) for k, one in found.majorities] == [(4, 0.5)]


def dppo_eval(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-W", "ignore", "-m", "dppo_megatron", "eval", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


def test_every_data_set_gets_samples_and_figures_the_same_on_two_ranks(tiny_model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small.jsonl"
    small.write_text("".join((tiny_model / "data" / "validation.jsonl").open().readlines()[:5]))
    common = (
        tiny_model,
        QUICKSTART,
        f"policy.model_name={tiny_model}",
        f"dppo.evaluation.datasets={{small: '{small}', again: '{small}'}}",
        "dppo.evaluation.num_generations=4",
        "dppo.reward.function=math",
    )
    one = dppo_eval(*common, "--output", tmp_path / "one")
    two = dppo_eval(*common, "cluster.gpus_per_node=2", "--output", tmp_path / "two")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert "small" in one.stdout
    assert "pass@4" in one.stdout
    samples = [json.loads(line) for line in (tmp_path / "one" / "small.jsonl").open()]
    assert len(samples) == 5 * 4
    assert (tmp_path / "one" / "small.jsonl").read_text() == (tmp_path / "two" / "small.jsonl").read_text()
    (figure, _) = json.loads((tmp_path / "one" / "evaluation.json").read_text())["datasets"]
    right = sum(sample["reward"] for sample in samples) / 20
    assert {k: one["value"] for k, one in figure["passes"]}[1] == pytest.approx(right)


def test_a_model_that_is_not_there_is_named(tmp_path: Path, tiny_model: Path) -> None:
    result = dppo_eval(tmp_path / "none", QUICKSTART, f"policy.model_name={tiny_model}")
    assert result.returncode == 2
    assert str(tmp_path / "none") in result.stderr
    assert "Traceback" not in result.stderr


def test_the_example_names_the_six_benchmarks() -> None:
    config = load_config(SIX).config
    assert [name for name, _ in dataset_configs(config)] == [
        "math-500",
        "aime24",
        "aime25",
        "amc",
        "minerva",
        "olympiadbench",
    ]
    assert config.dppo.evaluation.num_generations == 8
