"""The command line: what a user gets wrong is one clear message and an exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
RECIPE = Path(__file__).parent / "data" / "nemo_rl" / "configs" / "grpo_math_1B_megatron.yaml"


def dppo(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "dppo_megatron", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=cwd,
        env=environment,
        check=False,
    )


def run(model: Path, directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Train the quickstart for two steps with overrides."""
    common = (
        f"policy.model_name={model}",
        f"logger.log_dir={directory}/run",
        "grpo.max_num_steps=2",
        "checkpointing.enabled=false",
    )
    return dppo("train", QUICKSTART, *common, *overrides, cwd=directory)


def assert_one_message(result: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    """Exit code, every part in the message, nothing of a traceback."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("dppo: error") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tiny_model: Path, tmp_path: Path) -> None:
    result = run(tiny_model, tmp_path, "+grpo.num_prompt_per_step=7")
    assert_one_message(result, 2, "grpo.num_prompt_per_step", "num_prompts_per_step")


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    assert_one_message(dppo("train", tmp_path / "none.yaml"), 2, "none.yaml")


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    assert_one_message(run(tmp_path / "no" / "model", tmp_path), 2, "policy.model_name", "no/model")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["cluster.gpus_per_node=3", "policy.megatron_cfg.tensor_model_parallel_size=3"],
            ["tensor_model_parallel_size", "num_attention_heads, 4"],
        ),
        (
            ["cluster.gpus_per_node=3", "policy.megatron_cfg.pipeline_model_parallel_size=2"],
            ["cluster.gpus_per_node", "pipeline_model_parallel_size"],
        ),
        (
            ["cluster.gpus_per_node=4", "policy.megatron_cfg.pipeline_model_parallel_size=4"],
            ["pipeline_model_parallel_size", "2 layers"],
        ),
        (["cluster.num_nodes=2"], ["cluster.num_nodes", "torchrun or srun"]),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_processes_start(
    overrides: list[str], parts: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    assert_one_message(run(tiny_model, tmp_path, *overrides), 2, *parts)


def test_a_bad_data_row_is_named_with_file_and_line(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"input": "21=", "output": "12"}\n{"input": "31="}\n')
    result = run(tiny_model, tmp_path, f"data.train.data_path={tmp_path}/bad.jsonl")
    assert_one_message(result, 2, "bad.jsonl:2", "output")


def test_a_recipe_of_nemo_rl_trains_as_it_stands_on_another_model(tiny_model: Path, tmp_path: Path) -> None:
    common = (
        f"policy.model_name={tiny_model}",
        "policy.tokenizer.chat_template=null",
        "policy.precision=float32",
        "policy.max_total_sequence_length=32",
        "grpo.max_num_steps=1",
    )
    absent = dppo("train", RECIPE, *common, cwd=tmp_path)
    command = "python tools/prepare_data.py openmathinstruct-2 data/openmathinstruct-2.jsonl"
    assert_one_message(absent, 2, "OpenMathInstruct-2 is read from", command)
    rows = [{"input": f"{number}=", "output": str(number)} for number in range(100, 200)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "openmathinstruct-2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "examples" / "prompts").mkdir(parents=True)
    (tmp_path / "examples" / "prompts" / "cot.txt").write_text("{}")
    result = dppo("train", RECIPE, *common, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1 steps of 32 prompts x 16 completions" in result.stderr + result.stdout


def test_a_dead_reward_function_ends_the_run_with_its_own_words(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "dead_reward.py").write_text(
        "def score(prompt, completion, answer):\n    raise OSError('no judge')\n"
    )
    result = run(tiny_model, tmp_path, "dppo.reward.function=dead_reward:score", "cluster.gpus_per_node=2")
    assert_one_message(result, 1, "no judge")


def test_fresh_refuses_a_directory_that_is_in_use(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert_one_message(run(tiny_model, tmp_path, "--fresh"), 2, "--fresh", "logger.log_dir")


def test_a_directory_that_cannot_be_written_is_named(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file stands there")
    assert_one_message(run(tiny_model, tmp_path), 2, "logger.log_dir", str(tmp_path / "run"))


def test_a_file_that_cannot_be_written_is_one_message_with_what_to_look_at(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)  # once the run has begun: like a disk that fails
    assert_one_message(run(tiny_model, tmp_path), 1, "metrics.jsonl", "logger.log_dir")


def test_help_and_version_need_no_torch() -> None:
    code = "import sys; from dppo_megatron.cli import _parser; _parser(); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert "train" in dppo("--help").stdout


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word() -> None:
    command = f"{sys.executable} -m dppo_megatron config keys | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 141  # as a program that SIGPIPE has ended
    assert len(done.stdout.splitlines()) == 1
    assert not done.stderr
