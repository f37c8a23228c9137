"""Claims about NeMo-RL's own files (tests/data/nemo_rl, Apache-2.0): resolved alike, and each judged with reasons."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dppo_megatron.config.loader import ConfigError, Examination, LoadedConfig, examine, load_container
from dppo_megatron.config.registry import class_of, known_blocks, registry
from dppo_megatron.config.sections import schema_leaves, schema_sections

DATA = Path(__file__).parents[1] / "data" / "nemo_rl"
CONFIGS = DATA / "configs"
DENSE = {"Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-32B", "Qwen/Qwen3-8B-Base"}
DENSE |= {"meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"}
DENSE |= {"Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Math-1.5B-Instruct"}


def resolved_rows() -> Iterator[dict[str, Any]]:
    """What NeMo-RL's loader makes of each file whose bases are all here."""
    for line in (DATA / "resolved.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if (CONFIGS / row["file"]).is_file():
            yield row


@pytest.fixture(scope="module")
def examined() -> dict[str, Examination]:
    """Every GRPO file whose bases are here, examined as on the machine that made the data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", "/hf_home")
        patch.setenv("HF_DATASETS_CACHE", "/hf_datasets")
        found = {str(file.relative_to(CONFIGS)): examine(file) for file in sorted(CONFIGS.rglob("*.yaml"))}
    return {name: one for name, one in found.items() if "grpo" in one.loaded.container}


@pytest.fixture(scope="module")
def judged(examined: dict[str, Examination]) -> dict[str, Examination]:
    """Those that train by Megatron."""
    return {name: one for name, one in examined.items() if is_megatron(one.loaded)}


def is_megatron(loaded: LoadedConfig) -> bool:
    """Whether a file trains GRPO by Megatron."""
    policy = loaded.container.get("policy", {})
    return bool("grpo" in loaded.container and (policy.get("megatron_cfg") or {}).get("enabled"))


def is_listed(key: str) -> bool:
    """Whether a key is in the registry, holds keys that are, or lies in a pass-through map of it."""
    maps = [name.removesuffix(".*") for name in registry() if name.endswith(".*")]
    maps += ["policy.tokenizer.chat_template_kwargs", "policy.generation.vllm_kwargs"]
    known = registry().keys() | known_blocks() | schema_sections() | set(maps)
    return key in known or key.startswith(tuple(f"{name}." for name in maps))


def test_every_file_resolves_to_what_nemo_rl_s_own_loader_gives(examined: dict[str, Examination]) -> None:
    rows = list(resolved_rows())
    assert len(rows) == 140  # of 146; the bases of 6 are in directories that the data lacks
    different = [row["file"] for row in rows if examined[row["file"]].loaded.container != row["resolved"]]
    assert different == []


def test_every_grpo_file_loads(examined: dict[str, Examination]) -> None:
    assert len(examined) == 184
    unread = {error.reason for one in examined.values() for error in one.errors if "nterpolation" in error.reason}
    assert unread == set()


@pytest.mark.parametrize("line", (DATA / "overrides.jsonl").read_text(encoding="utf-8").splitlines())
def test_overrides_do_what_they_do_there(line: str) -> None:
    row = json.loads(line)
    if "resolved" in row:
        assert load_container(CONFIGS / row["file"], row["overrides"]) == row["resolved"]
    else:
        with pytest.raises(ConfigError):
            load_container(CONFIGS / row["file"], row["overrides"])


def test_every_key_of_the_megatron_files_is_in_the_registry() -> None:
    keys = (DATA / "megatron_keys.txt").read_text(encoding="utf-8").split()
    assert len(keys) == 659
    assert [key for key in keys if not is_listed(key)] == []


def test_no_key_of_a_real_file_is_unknown(judged: dict[str, Examination]) -> None:
    assert len(judged) >= 117
    unknown = {str(error) for one in judged.values() for error in one.errors if error.reason == "unknown key"}
    assert unknown == set()


def test_every_error_and_warning_names_key_value_place_reason_and_alternative(judged: dict[str, Examination]) -> None:
    for one in judged.values():
        for problem in (*one.errors, *one.warnings):
            assert problem.key
            assert Path(problem.place.file).is_file(), problem
            assert problem.place.line is not None, problem
            assert problem.reason, problem
            assert problem.alternative, problem


def test_a_dense_file_is_rejected_on_keys_of_the_registry_alone(judged: dict[str, Examination]) -> None:
    dense = [one for one in judged.values() if one.loaded.container["policy"]["model_name"] in DENSE]
    assert len(dense) >= 31
    keys = {error.key for one in dense for error in one.errors}
    assert [key for key in keys if not is_listed(key)] == []


def test_what_is_honoured_is_what_the_schema_holds_and_each_key_has_a_meaning() -> None:
    rows = registry()
    assert [key for key in schema_leaves() if key not in rows] == []
    assert [key for key in schema_leaves() if rows[key].kind != "honoured"] == []
    assert [key for key, row in rows.items() if class_of(row) == "honoured" and key not in schema_leaves()] == []
    assert [key for key, row in rows.items() if not row.meaning] == []


def test_whatever_is_ignored_or_rejected_says_why_and_what_instead() -> None:
    silent = [key for key, row in registry().items() if row.kind in ("ignored", "rejected") and not row.reason]
    helpless = [key for key, row in registry().items() if row.kind in ("ignored", "rejected") and not row.alternative]
    assert (silent, helpless) == ([], [])
