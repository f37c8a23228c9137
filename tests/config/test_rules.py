"""Claims about the configurations that are refused."""

from pathlib import Path

import pytest

from dppo_megatron.config.loader import load_config
from dppo_megatron.config.rules import check_config
from dppo_megatron.config.schema import Config

BASE = """
policy: {model_name: some/model, generation: {max_new_tokens: 256}}
data:
  train: {data_path: train.jsonl}
"""
PRUNING = ("dppo.enabled=true", "dppo.denominator=estimated_tokens")


def load(folder: Path, *overrides: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(BASE)
    return load_config(path, overrides).config


def refused(config: Config) -> list[str]:
    try:
        check_config(config)
    except ValueError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        PRUNING,
        ("dppo.denominator=constant",),
        ("loss_fn.token_level_loss=false", "dppo.enabled=true"),
        ("dppo.prompt_pruning.enabled=false",),
        ("dppo.enabled=false", "dppo.denominator=estimated_tokens"),
        ("dppo.enabled=false", "dppo.completion_pruning.rate=0.99"),
        (*PRUNING, "dppo.completion_pruning.policy=top", "dppo.completion_pruning.rate=0.99"),
        (*PRUNING, "dppo.completion_pruning.rate=0.9", "dppo.completion_pruning.min_keep_probability=0.1"),
        (*PRUNING, "dppo.completion_pruning.policy=threshold", "dppo.completion_pruning.scope=group"),
        ("policy.generation.backend=megatron", "dppo.enabled=false", "dppo.rollout.engine=embedded"),
        ("loss_fn.force_on_policy_ratio=true",),
        ("policy.precision=float32",),
        ("grpo.val_period=0",),
        ("policy.max_total_sequence_length=4096",),
    ],
)
def test_a_sound_configuration_is_accepted(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert refused(load(tmp_path, *overrides)) == []


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("policy.generation.temperature=0", "must be above 0"),
        ("policy.generation.max_new_tokens=513", "must be at most policy.max_total_sequence_length = 512"),
        ("policy.generation.backend=megatron", "unless dppo.rollout.engine is embedded"),
        ("data.max_input_seq_length=513", "must be at most policy.max_total_sequence_length = 512"),
        ("policy.sequence_packing.train_mb_tokens=511", "one sequence of policy.max_total_sequence_length"),
        ("policy.megatron_cfg.pipeline_dtype=float32", "must equal policy.precision, bfloat16"),
        ("policy.megatron_cfg.optimizer.clip_grad=0.5", "must equal policy.max_grad_norm, 1.0"),
        ("policy.megatron_cfg.optimizer.min_lr=1", "must be at most policy.megatron_cfg.optimizer.lr, 5e-06"),
        ("policy.megatron_cfg.scheduler.lr_warmup_init=1", "must be at most"),
        ("policy.megatron_cfg.scheduler.lr_warmup_iters=1000", "must be below lr_decay_iters, 1000"),
        ("policy.megatron_cfg.optimizer.adam_beta1=1", "must be at least 0 and below 1"),
        ("policy.train_global_batch_size=100", "must divide grpo.num_prompts_per_step"),
        ("cluster.gpus_per_node=0", "must be at least 1"),
        ("grpo.num_generations_per_prompt=1", "must be at least 2"),
        ("grpo.val_period=-2", "must be a period, or 0 or -1 for never"),
        ("checkpointing.save_period=0", "must be at least 1"),
        ("loss_fn.ratio_clip_c=1.0", "must be above 1"),
        ("loss_fn.ratio_clip_min=-0.1", "must be at least 0"),
        ("loss_fn.reference_policy_kl_penalty=nan", "must be finite"),
        ("policy.megatron_cfg.optimizer.lr=inf", "must be finite"),
        ("dppo.packing.window=0", "must be at least 1"),
        ("dppo.rollout.max_cache_tokens=0", "must be at least 1"),
        ("dppo.prompt_pruning.rate=1.0", "must be at least 0 and below 1"),
        ("dppo.prompt_pruning.ema_decay=1", "must be at least 0 and below 1"),
        ("dppo.prompt_pruning.min_keep_probability=0", "must be above 0 and at most 1"),
        ("dppo.completion_pruning.min_keep_probability=1.1", "must be above 0 and at most 1"),
        ("dppo.prompt_pruning.rate=0.81", "1 - dppo.prompt_pruning.min_keep_probability, 1 - 0.2"),
        ("dppo.completion_pruning.rate=0.96", "1 - dppo.completion_pruning.min_keep_probability, 1 - 0.05"),
        ("dppo.completion_pruning.scope=group", "is for policy threshold, not neyman"),
        ("loss_fn.truncated_importance_sampling_type=tis", "needs loss_fn.use_importance_sampling_correction"),
        ("loss_fn.truncated_importance_sampling_ratio=2.0", "stands with loss_fn.truncated_importance_sampling_type"),
        ("loss_fn.truncated_importance_sampling_ratio_min=0.5", "must be at most"),
        ("loss_fn.sequence_level_importance_ratios=true", "needs a sequence mean"),
        ("grpo.batch_multiplier=2", "must be 1 without grpo.use_dynamic_sampling"),
        ("grpo.use_dynamic_sampling=true", "use greso, or dppo.prompt_pruning.enabled: false"),
        ("grpo.reward_scaling.source_min=1.0", "must be below source_max, 1.0"),
        ("grpo.reward_shaping.stop_properly_penalty_coef=2.0", "must be at least 0 and at most 1"),
        ("dppo.prompt_pruning.greso.step=2.0", "must be at least 0 and at most 1"),
        ("dppo.prompt_pruning.greso.min_exploration=0", "must be above 0 and at most 1"),
        ("policy.generation.vllm_cfg.gpu_memory_utilization=1.5", "must be above 0 and at most 1"),
        ("dppo.rollout.time_limit_seconds=0", "must be above 0"),
        ("dppo.fp8_emulate=true", "needs policy.megatron_cfg.fp8_cfg.enabled: true"),
    ],
)
def test_a_wrong_value_is_refused_by_key_and_value(tmp_path: Path, override: str, reason: str) -> None:
    config = load(tmp_path, *PRUNING, override)
    key, _, value = override.partition("=")
    lines = [line for line in refused(config) if line.startswith(f"{key} = ")]
    assert any(reason in line for line in lines), refused(config)
    assert value.strip("'").lower().rstrip("0.") in lines[0].lower()


def test_the_row_cap_must_hold_the_longest_sequence_as_padded(tmp_path: Path) -> None:
    overrides = (
        "policy.megatron_cfg.context_parallel_size=3",
        "cluster.gpus_per_node=3",
        "policy.sequence_packing.train_mb_tokens=515",
        "policy.sequence_packing.logprob_mb_tokens=516",
    )
    (line,) = refused(load(tmp_path, *overrides))
    assert "516 tokens when padded to a multiple of 6" in line
    assert not refused(load(tmp_path, *overrides[:2], "policy.sequence_packing.train_mb_tokens=516"))


def test_a_token_mean_under_prompt_pruning_names_the_three_ways_out(tmp_path: Path) -> None:
    (line,) = refused(load(tmp_path, "dppo.enabled=true"))
    assert line.startswith("dppo.denominator = 'candidates': ")
    for way_out in (
        ("loss_fn.token_level_loss", "false"),
        ("dppo.denominator", "constant"),
        ("dppo.denominator", "estimated_tokens"),
    ):
        assert ": ".join(way_out) in line
        assert not refused(load(tmp_path, "dppo.enabled=true", "=".join(way_out)))


@pytest.mark.parametrize("denominator", ["constant", "estimated_tokens"])
def test_a_denominator_of_tokens_contradicts_a_sequence_mean(tmp_path: Path, denominator: str) -> None:
    config = load(tmp_path, "loss_fn.token_level_loss=false", f"dppo.denominator={denominator}")
    (line,) = refused(config)
    assert line.startswith(f"dppo.denominator = '{denominator}': counts tokens")


def test_estimated_tokens_without_prompt_pruning_is_refused(tmp_path: Path) -> None:
    (line,) = refused(load(tmp_path, *PRUNING, "dppo.prompt_pruning.enabled=false"))
    assert "needs dppo.prompt_pruning.enabled" in line


def test_an_on_policy_ratio_needs_one_optimizer_step(tmp_path: Path) -> None:
    config = load(tmp_path, "loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=128")
    (line,) = refused(config)
    assert line.startswith("loss_fn.force_on_policy_ratio = True: ")
    assert "makes it 4" in line


def test_advantage_clips_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    (line,) = refused(load(tmp_path, "grpo.advantage_clip_low=2", "grpo.advantage_clip_high=1"))
    assert line.startswith("grpo.advantage_clip_low = 2.0: ")


def test_all_problems_are_raised_together(tmp_path: Path) -> None:
    lines = refused(load(tmp_path, "policy.generation.temperature=0.0", "grpo.max_num_steps=0", "dppo.enabled=true"))
    assert [line.split(" = ")[0] for line in lines] == [
        "grpo.max_num_steps",
        "policy.generation.temperature",
        "dppo.denominator",
    ]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("loss_fn.use_cispo=true", "loss_fn.ratio_clip_c=3"), "loss_fn.ratio_clip_c"),
        (("loss_fn.disable_ppo_ratio=true", "loss_fn.use_cispo=true"), "loss_fn.use_cispo"),
        (
            ("loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_type=icepop"),
            "loss_fn.truncated_importance_sampling_ratio",
        ),
        (
            ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=600"),
            "grpo.reward_shaping.overlong_buffer_length",
        ),
        (
            ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_penalty=null"),
            "grpo.reward_shaping.overlong_buffer_penalty",
        ),
        (
            ("grpo.use_dynamic_sampling=true", "dppo.audit.period=1", "dppo.rollout.replay_dir=x"),
            "grpo.use_dynamic_sampling",
        ),
    ],
)
def test_options_of_the_loss_and_of_rewards_that_contradict_each_other_are_refused(
    tmp_path: Path, overrides: tuple[str, ...], key: str
) -> None:
    assert any(line.startswith(f"{key} = ") for line in refused(load(tmp_path, *overrides)))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("policy.generation.vllm_cfg.tensor_parallel_size=3", "must divide the run's 2 processes"),
        ("policy.generation.vllm_cfg.max_model_len=511", "must be at least policy.max_total_sequence_length, 512"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_where_it_is_used(tmp_path: Path, override: str, reason: str) -> None:
    overrides = ("cluster.gpus_per_node=2", override)
    assert not refused(load(tmp_path, *overrides))
    (line,) = refused(load(tmp_path, *overrides, "dppo.enabled=false", "dppo.rollout.engine=vllm"))
    assert line.startswith(override.partition("=")[0])
    assert reason in line


FP8 = "policy.megatron_cfg.fp8_cfg"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ([f"{FP8}.fp8_param=true"], f"{FP8}.fp8_param", "enabled: true"),
        ([f"{FP8}.enabled=true", "policy.precision=float32"], f"{FP8}.enabled", "bfloat16"),
        (
            [f"{FP8}.enabled=true", f"{FP8}.fp8_recipe=delayed", f"{FP8}.first_last_layers_bf16=true"],
            f"{FP8}.first_last_layers_bf16",
            "delayed",
        ),
        (
            [
                "dppo.enabled=false",
                "dppo.fp8_emulate=true",
                f"{FP8}.enabled=true",
                f"{FP8}.fp8_recipe=delayed",
                "policy.megatron_cfg.activation_checkpointing=true",
            ],
            "policy.megatron_cfg.activation_checkpointing",
            "newer scales",
        ),
        (["checkpointing.checkpoint_must_save_by=4h"], "checkpointing.checkpoint_must_save_by", "DD:HH:MM:SS"),
    ],
)
def test_settings_of_fp8_and_time_that_cannot_be_are_refused(
    tmp_path: Path, overrides: list[str], key: str, reason: str
) -> None:
    (line,) = refused(load(tmp_path, *overrides))
    assert line.startswith(f"{key} = ")
    assert reason in line


def test_a_rehearsal_of_fp8_needs_no_bfloat16(tmp_path: Path) -> None:
    overrides = (f"{FP8}.enabled=true", "policy.precision=float32", "dppo.enabled=false")
    assert refused(load(tmp_path, *overrides))
    assert not refused(load(tmp_path, *overrides, "dppo.fp8_emulate=true"))
