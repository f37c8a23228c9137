"""Claims about keys that are not honoured: misspelt ones, values that change nothing, and what a switch turns off."""

import random
from pathlib import Path

import pytest

from dppo_megatron.config.loader import Examination, examine
from dppo_megatron.config.registry import edits, nearest_key, registry
from dppo_megatron.config.sections import schema_leaves

MINIMAL = "policy: {model_name: some/model}\ndata:\n  train: {data_path: train.jsonl}\n"


def examined(folder: Path, text: str) -> Examination:
    path = folder / "run.yaml"
    path.write_text(MINIMAL + text)
    return examine(path)


def misspell(name: str, stream: random.Random) -> str:
    """One slip of the keyboard: a letter left out, doubled, swapped with its neighbour, or another one."""
    place = stream.randrange(len(name) - 1)
    slip = stream.choice(("leave", "double", "swap", "other"))
    if slip == "leave":
        return name[:place] + name[place + 1 :]
    if slip == "double":
        return name[:place] + name[place] + name[place:]
    if slip == "swap":
        return name[:place] + name[place + 1] + name[place] + name[place + 2 :]
    return name[:place] + stream.choice("abcdefghijklmnopqrstuvwxyz") + name[place + 1 :]


def test_of_two_hundred_misspelt_keys_at_least_95_percent_are_guessed_right() -> None:
    stream = random.Random(7)
    known = [key for key in sorted({*registry(), *schema_leaves()}) if not key.endswith(".*")]
    names = set(known)
    wrong: list[tuple[str, str | None, str]] = []
    for key in stream.sample(known, 200):
        block, _, name = key.rpartition(".")
        bad = key
        while bad in names:
            bad = f"{block}.{misspell(name, stream)}" if block else misspell(name, stream)
        guess = nearest_key(bad)
        if guess != key:
            wrong.append((bad, guess, key))
    assert len(wrong) <= 10, wrong


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("grpo: {num_prompt_per_step: 7}", "grpo.num_prompt_per_step", "grpo.num_prompts_per_step"),
        ("grpo: {reward_scalng: {enabled: true}}", "grpo.reward_scalng", "grpo.reward_scaling"),
        ("dppo: {enabled: false, prompt_prunning: {rate: 0.1}}", "dppo.prompt_prunning", "dppo.prompt_pruning"),
        ("data_plain: {enabled: true}", "data_plain", "data_plane"),
        ("temperature: 1.0", "temperature", "policy.generation.temperature"),
    ],
)
def test_a_misspelt_key_in_a_file_is_an_error_with_the_right_one(
    tmp_path: Path, text: str, key: str, nearest: str
) -> None:
    (error,) = examined(tmp_path, text).errors
    assert (error.key, error.reason, error.place.line) == (key, "unknown key", 4)
    assert error.alternative == f"the nearest known one is {nearest}"


def test_edits_are_those_of_optimal_string_alignment() -> None:
    pairs = {("lr", "lr"): 0, ("lr", "rl"): 1, ("seed", "sed"): 1, ("abc", "axbyc"): 2, ("kitten", "sitting"): 3}
    assert {pair: edits(*pair) for pair in pairs} == pairs


@pytest.mark.parametrize(
    "text",
    [
        "data_plane: null",
        "async_rl: {}",
        "grpo: {adv_estimator: {normalize_rewards: true}, normalize_rewards: true}",
        "grpo: {async_grpo: {enabled: false, max_trajectory_age_steps: 7}}",
        "grpo: {val_batch_size: 3}",
    ],
)
def test_a_value_that_changes_nothing_loads_in_silence(tmp_path: Path, text: str) -> None:
    found = examined(tmp_path, text)
    assert (found.errors, found.warnings) == ((), ())


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("grpo: {async_grpo: {enabled: true}}", "grpo.async_grpo.enabled"),
        ("grpo: {adv_estimator: {normalize_rewards: false}}", "grpo.adv_estimator.normalize_rewards"),
        ("grpo: {max_rollout_turns: true}", "grpo.max_rollout_turns"),
        ("data_plane: 3", "data_plane"),
        ("trainer: {devices: 8}", "trainer.devices"),
    ],
)
def test_a_value_that_would_change_what_is_trained_is_an_error(tmp_path: Path, text: str, key: str) -> None:
    (error,) = examined(tmp_path, text).errors
    assert (error.key, error.place.line) == (key, 4)
    assert error.reason != "unknown key"


@pytest.mark.parametrize(
    "override",
    [
        "policy.generation.top_p=0.9",
        "policy.generation.top_k=50",
        "policy.generation.val_top_p=0.9",
        "policy.generation.colocated.enabled=false",
        "policy.generation.vllm_cfg.async_engine=true",
        "policy.generation.vllm_cfg.pipeline_parallel_size=2",
        "policy.sequence_packing.enabled=false",
        "policy.megatron_cfg.enabled=false",
        "policy.megatron_cfg.optimizer.optimizer=sgd",
        "data.validation.env_name=exact_match",
    ],
)
def test_a_key_that_holds_one_value_refuses_another_and_says_what_to_use(tmp_path: Path, override: str) -> None:
    examined(tmp_path, "  validation: {data_path: val.jsonl}\nloss_fn: {token_level_loss: false}\n")
    (error,) = examine(tmp_path / "run.yaml", [override]).errors
    key, _, _ = override.partition("=")
    assert (error.key, error.place.file) == (key, f"override {override}")
    assert error.alternative.startswith(("use ", "leave it out"))
    row = registry()[key]
    assert row.kind == "rejected"
    assert row.inert


def test_what_is_ignored_is_a_warning_and_leaves_the_configuration_as_it_was(tmp_path: Path) -> None:
    found = examined(tmp_path, "logger: {monitor_gpus: true, log_dir: here}")
    assert found.errors == ()
    (warning,) = found.warnings
    assert (warning.key, warning.value, warning.place.line) == ("logger.monitor_gpus", True, 4)
    assert "monitor_gpus" not in found.loaded.effective["logger"]
    assert found.loaded.container["logger"]["monitor_gpus"] is True


def test_broken_files_types_rules_and_references_are_all_told_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "torn.yaml").write_text("grpo:\n  seed: [1\n")
    (tmp_path / "round.yaml").write_text("defaults: run.yaml\n")
    (tmp_path / "run.yaml").write_text(
        "defaults: [torn.yaml, round.yaml, none.yaml]\n"
        "policy: {model_name: some/model, max_total_sequence_length: -8}\n"
        "grpo: {num_prompts_per_step: '8', num_generations_per_prompt: 0.5, max_num_steps: null}\n"
        "logger: {log_dir: '${nowhere}'}\n"
    )
    found = examine(tmp_path / "run.yaml")
    told = {(Path(error.place.file).name, error.place.line, error.key) for error in found.errors}
    assert told == {
        ("torn.yaml", 3, ""),
        ("round.yaml", 1, "defaults"),
        ("run.yaml", 1, "defaults"),
        ("run.yaml", 2, "policy.max_total_sequence_length"),
        ("run.yaml", 3, "grpo.num_prompts_per_step"),
        ("run.yaml", 3, "grpo.num_generations_per_prompt"),
        ("run.yaml", 3, "grpo.max_num_steps"),
        ("run.yaml", 4, "logger.log_dir"),
    }
    assert all("\n" not in str(error) for error in found.errors)
