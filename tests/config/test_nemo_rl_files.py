"""Claims about NeMo-RL's own files (tests/data/nemo_rl, Apache-2.0): resolved alike, and each judged with reasons."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dppo_megatron.config.loader import ConfigError, Examination, examine, load_container
from dppo_megatron.config.registry import class_of, known_blocks, registry
from dppo_megatron.config.sections import schema_leaves, schema_sections
from tools.nemo_rl_table import Group, grpo_files, is_megatron, lacks_base

DATA = Path(__file__).parents[1] / "data" / "nemo_rl"
CONFIGS = DATA / "configs"
MISSING_BASES = {
    "grpo-nanov3-30BA3B-2n8g-megatron_generation-async-gym": "nemo_gym/grpo_nanov3.yaml",
    "grpo-nanov3-30ba3b-3n8g-megatron-dynamo-swe1": "nemo_gym/grpo_nanov3.yaml",
    "grpo-nanov3-30ba3b-4n4g-megatron-qa-nvfp4-w4a16-real": "modelopt/qa_grpo_nano3_megatron.yaml",
    "grpo-qwen3-1.7b-1n8g-megatron-super-swe1": "nemo_gym/nemotron-3-super/stage2_swe1.yaml",
    "grpo-qwen3-1.7b-2n8g-megatron-super-rlhf": "nemo_gym/nemotron-3-super/stage3_rlhf.yaml",
    "grpo-qwen3-1.7b-6n8g-megatron-super-rlvr": "nemo_gym/nemotron-3-super/stage1_rlvr.yaml",
    "grpo-qwen3-30ba3b-4n4g-megatron-qa-nvfp4-w4a4-real": "modelopt/qa_grpo_qwen3_30ba3b_megatron.yaml",
    "grpo-qwen3-30ba3b-4n8g-megatron-qa-nvfp4": "modelopt/qa_grpo_qwen3_30ba3b_megatron.yaml",
    "grpo-qwen3-30ba3b-thinking-swe1-16n8g-megatron-cp2-r3-async-gym": (
        "nemo_gym/grpo_qwen3_30ba3b_thinking_swe1.yaml"
    ),
}


@pytest.fixture(scope="module")
def examined() -> dict[str, Examination]:
    """Every GRPO file whose bases are here, examined as on the machine that made the data."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_that_machine(patch)
        found = {str(file.relative_to(CONFIGS)): examine(file) for file in sorted(CONFIGS.rglob("*.yaml"))}
    return {name: one for name, one in found.items() if "grpo" in one.loaded.container and not lacks_base(one)}


@pytest.fixture(scope="module")
def judged(examined: dict[str, Examination]) -> dict[str, Examination]:
    """Those that train by Megatron."""
    return {name: one for name, one in examined.items() if is_megatron(one.loaded.container)}


@pytest.fixture(scope="module")
def groups() -> dict[str, Group]:
    """The files whose names begin with grpo, as the documentation's table has them."""
    with pytest.MonkeyPatch.context() as patch:
        as_on_that_machine(patch)
        return {group.title: group for group in grpo_files(CONFIGS)}


def as_on_that_machine(patch: pytest.MonkeyPatch) -> None:
    """Set what NeMo-RL's files read of the environment."""
    patch.setenv("HF_HOME", "/hf_home")
    patch.setenv("HF_DATASETS_CACHE", "/hf_datasets")


def leaves(block: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values, as text, of a container."""
    for name, value in block.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)


def is_listed(key: str) -> bool:
    """Whether a key is in the registry, holds keys that are, or lies in a pass-through map of it."""
    maps = [name.removesuffix(".*") for name in registry() if name.endswith(".*")]
    maps += ["policy.tokenizer.chat_template_kwargs", "policy.generation.vllm_kwargs"]
    known = registry().keys() | known_blocks() | schema_sections() | set(maps)
    return key in known or key.startswith(tuple(f"{name}." for name in maps))


def test_every_file_resolves_to_what_nemo_rl_s_own_loader_gives(examined: dict[str, Examination]) -> None:
    rows = [json.loads(line) for line in (DATA / "resolved.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 146
    here = [row for row in rows if row["file"] in examined]
    different = [row["file"] for row in here if examined[row["file"]].loaded.container != row["resolved"]]
    assert different == []
    absent = {Path(row["file"]).stem for row in rows if row["file"] not in examined}
    assert absent < MISSING_BASES.keys()
    assert len(absent) == 6


def test_every_grpo_file_whose_bases_are_here_loads(examined: dict[str, Examination]) -> None:
    assert len([name for name in examined if Path(name).name.startswith("grpo")]) == 176 - len(MISSING_BASES)
    unread = {error.reason for one in examined.values() for error in one.errors if "nterpolation" in error.reason}
    assert unread == set()


@pytest.mark.parametrize("name", MISSING_BASES)
def test_a_file_whose_base_is_not_here_names_it_and_the_chain(name: str) -> None:
    file = CONFIGS / "recipes" / "llm" / f"{name}.yaml"
    (problem,) = [error for error in examine(file).errors if error.key == "defaults"]
    assert str(problem.value).endswith(MISSING_BASES[name])
    assert f"{problem.value} <- " in problem.reason
    assert problem.reason.endswith(str(file))


def test_the_groups_are_those_that_the_lists_of_keys_were_made_of(groups: dict[str, Group]) -> None:
    sizes = {title: len(group.found) for title, group in groups.items()}
    assert sizes == {
        "dense on vLLM": 31,
        "other Megatron files": 82,
        "without Megatron": 54,
        "whose base file is not there": 9,
    }
    dense = [dict(leaves(one.loaded.container)) for one in groups["dense on vLLM"].found.values()]
    keys = {key for one in dense for key in one}
    assert keys == set((DATA / "core_dense_keys.txt").read_text(encoding="utf-8").split())
    assert sum(len({one.get(key) for one in dense}) > 1 for key in keys) == 120


def test_so_many_files_are_accepted_as_they_stand(groups: dict[str, Group]) -> None:
    accepted = {title: sum(not one.errors for one in group.found.values()) for title, group in groups.items()}
    assert accepted == {
        "dense on vLLM": 16,
        "other Megatron files": 3,
        "without Megatron": 0,
        "whose base file is not there": 0,
    }


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
    assert len(judged) >= 113
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


def test_a_dense_file_is_rejected_on_keys_of_the_registry_alone(groups: dict[str, Group]) -> None:
    keys = {error.key for one in groups["dense on vLLM"].found.values() for error in one.errors}
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
