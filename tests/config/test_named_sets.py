"""Claims about public data sets that a recipe names: where their rows are read, and what is said of absent ones."""

from pathlib import Path

import pytest
import yaml

from dppo_megatron.config.loader import examine, load_config
from dppo_megatron.config.named_sets import DIRECTORY_VARIABLE, NAMED_SETS
from dppo_megatron.rl.prompts import load_prompts
from dppo_megatron.run_plan import examine_run
from tools.prepare_data import SOURCES


def write(folder: Path, data: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(f"policy: {{model_name: Qwen/Qwen3-4B}}\ndata:\n  train: {data}\n")
    return path


def test_every_set_that_can_be_prepared_has_a_name_and_no_other_has() -> None:
    assert {prepared for splits in NAMED_SETS.values() for prepared in splits.values()} == set(SOURCES)


@pytest.mark.parametrize(
    ("train", "file"),
    [
        ("{dataset_name: OpenMathInstruct-2}", "data/openmathinstruct-2.jsonl"),
        ("{dataset_name: gsm8k, split: train}", "data/gsm8k.jsonl"),
        ("{dataset_name: gsm8k, split: test}", "data/gsm8k-test.jsonl"),
        ("{dataset_name: ResponseDataset, data_path: own.jsonl}", "own.jsonl"),
        ("{data_path: own.jsonl, split: anything}", "own.jsonl"),
        (
            "{dataset_name: DAPOMath17K, data_path: data/dapo-math-17k-verbatim.jsonl}",
            "data/dapo-math-17k-verbatim.jsonl",
        ),
    ],
)
def test_a_named_set_is_read_from_its_prepared_file(tmp_path: Path, train: str, file: str) -> None:
    loaded = load_config(write(tmp_path, train))
    assert loaded.config.data.train.data_path == file
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(loaded.effective))
    assert load_config(again).config == loaded.config


def test_a_name_may_stand_in_the_defaults_of_both_sets(tmp_path: Path) -> None:
    path = write(tmp_path, "{}\n  validation: {dataset_name: AIME2024}\n  default: {dataset_name: DeepScaler}")
    data = load_config(path).config.data
    assert data.validation is not None
    assert (data.train.data_path, data.validation.data_path) == ("data/deepscaler.jsonl", "data/aime24.jsonl")


def test_the_directory_of_prepared_sets_is_the_environment_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, "/sets")
    config = load_config(write(tmp_path, "{dataset_name: math}")).config
    assert config.data.train.data_path == "/sets/math.jsonl"


@pytest.mark.parametrize(
    ("train", "key", "told"),
    [
        ("{dataset_name: clevr-cogent}", "data.train.dataset_name", "OpenMathInstruct-2, DAPOMath17K"),
        ("{dataset_name: gsm8k, split: valid}", "data.train.split", "use train, test"),
        ("{dataset_name: AIME2024, split: test}", "data.train.split", "use null"),
        (
            "{dataset_name: math, data_path: own.jsonl}",
            "data.train.data_path",
            "leave it out, or put data/math.jsonl",
        ),
        ("{dataset_name: 3, data_path: own.jsonl}", "data.train.dataset_name", "the default is null"),
        ("{dataset_name: ResponseDataset}", "data.train.data_path", "set it"),
    ],
)
def test_what_cannot_be_found_is_one_error_with_what_can(tmp_path: Path, train: str, key: str, told: str) -> None:
    (error,) = examine(write(tmp_path, train)).errors
    assert error.key == key
    assert told in error.alternative


def test_a_set_that_is_not_here_is_a_warning_of_the_plan_and_an_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "{dataset_name: OpenMathInstruct-2, prompt_file: cot.txt}")
    command = "python tools/prepare_data.py openmathinstruct-2 data/openmathinstruct-2.jsonl"
    found = examine_run(str(path), ())
    assert found.errors == ()
    name, prompt = found.warnings
    assert (name.key, prompt.key) == ("data.train.dataset_name", "data.train.prompt_file")
    assert (name.place.line, prompt.place.line) == (3, 3)
    assert command in name.alternative
    config = load_config(path).config
    with pytest.raises(ValueError, match=command):
        load_prompts(
            config.data.train,
            tokenizer=None,  # pyright: ignore[reportArgumentType]
            tokenizer_config=config.policy.tokenizer,
            max_prompt_tokens=9,
        )
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "openmathinstruct-2.jsonl").touch()
    (tmp_path / "cot.txt").touch()
    assert examine_run(str(path), ()).warnings == ()
