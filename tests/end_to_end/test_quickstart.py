"""The example that a newcomer runs: it climbs, and leaves what it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_tiny_model import make_tiny_model

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quickstart")
    make_tiny_model(root / "model", seed=0, steps=400)
    overrides = [f"policy.model_name={root}/model", f"logger.log_dir={root}/run", "grpo.seed=1"]
    result = subprocess.run(
        [sys.executable, "-m", "dppo_megatron", "train", str(QUICKSTART), *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (root / "run" / "stdout.txt").write_text(result.stdout)
    return root / "run"


def test_accuracy_rises_from_a_quarter_at_most_to_four_fifths_at_least(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy_before"] <= 0.25
    assert summary["accuracy_after"] >= 0.80
    assert summary["train_seconds"] <= 90


def test_pruning_saves_most_of_the_training_tokens(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["train_tokens"] < 0.5 * summary["train_tokens_without_pruning"]
    assert summary["rollout_tokens"] < summary["train_tokens_without_pruning"]


def test_the_reader_gets_one_line_a_step_and_the_path_of_the_run(run: Path) -> None:
    lines = (run / "stdout.txt").read_text().splitlines()
    assert sum("/150 " in line for line in lines) == 150
    assert str(run) in lines[-1]
    assert max(map(len, lines[1:])) <= 120


def test_the_exported_model_sorts_and_loads_in_transformers(run: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(run / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run / "hf")
    prompt = tokenizer("70412=", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=9, do_sample=False)
    assert tokenizer.decode(output[0], skip_special_tokens=True) == "70412=01247"


def test_the_run_s_directory_holds_what_the_docs_say(run: Path) -> None:
    names = {path.name for path in run.iterdir()} - {"stdout.txt"}
    expected = {"config.yaml", "provenance.json", "metrics.jsonl", "summary.json", "tensorboard", "checkpoints", "hf"}
    assert expected <= names
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 150
