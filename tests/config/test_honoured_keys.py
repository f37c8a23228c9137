"""Claims about honoured keys: another value of each makes a difference in what is built, or in what it does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dppo_megatron.config.loader import LoadedConfig, examine, load_config
from dppo_megatron.config.named_sets import DIRECTORY_VARIABLE
from dppo_megatron.config.registry import class_of, registry
from dppo_megatron.parallel.mesh import open_mesh
from dppo_megatron.plan import Layout
from tests.config import honoured_runs as runs
from tests.config import honoured_workshop as built
from tests.config.honoured_workshop import Workshop

MINIMAL = "policy: {model_name: some/model}\ndata:\n  train: {data_path: train.jsonl}\n"
Probe = Callable[[Workshop, LoadedConfig], object]


@dataclass(frozen=True)
class Row:
    """A key's other value, what must stand beside it (in both), and where the difference shows.

    changes: overrides of this key alone. beside: parted by blanks.
    """

    probe: Probe
    change: str
    beside: str = ""


def _table() -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for prefix, probe, text in _SECTIONS:
        for line in text.strip().splitlines():
            assignment, _, beside = line.strip().partition(" | ")
            key = f"{prefix}{assignment.partition('=')[0]}"
            assert key not in rows, key
            rows[key] = Row(probe, f"{prefix}{assignment}", beside)
    return rows


_OWN = "dppo.reward.function=tests.config.honoured_runs:count_letters"
_MEGATRON, _DPPO = "policy.megatron_cfg.", "dppo."
_NO_PROMPTS = "dppo.prompt_pruning.enabled=false"
_SPLIT = "data.validation=null data.train.split_validation_size=0.25"
_UNSET = "~data.train.data_path +data.default.data_path=FOLDER/rows.jsonl"
_TWO_GPUS = "cluster.gpus_per_node=2"
_SHAPED = (
    "grpo.reward_shaping.enabled=true grpo.reward_shaping.overlong_buffer_length=4 "
    "grpo.reward_shaping.max_response_length=10"
)
_SCALED = "grpo.reward_scaling.enabled=true"
_GRESO = "dppo.prompt_pruning.policy=greso"
_KL = "loss_fn.reference_policy_kl_penalty=0.1"
_TIS = (
    "loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_type=icepop "
    "loss_fn.truncated_importance_sampling_ratio=2.0 loss_fn.truncated_importance_sampling_ratio_min=0.5"
)
_SAVED = "checkpointing.checkpoint_dir=FOLDER/NEW"
_VLLM = "dppo.rollout.engine=vllm"
_RECOMPUTED = "policy.megatron_cfg.activation_checkpointing=true"
_SELECTIVE = f"{_RECOMPUTED} policy.megatron_cfg.recompute_granularity=selective"
_BF16 = "policy.precision=bfloat16 policy.sequence_packing.train_mb_tokens=256"
_FP8 = f"{_BF16} policy.megatron_cfg.fp8_cfg.enabled=true"
_LAYERS = f"{_FP8} policy.megatron_cfg.fp8_cfg.first_last_layers_bf16=true"
_DECAY = "policy.megatron_cfg.scheduler.lr_decay_iters=15"
_LINEAR = "policy.megatron_cfg.scheduler.lr_decay_style=linear"
_RISING = "policy.megatron_cfg.scheduler.weight_decay_incr_style=linear"
_HEAVIER = "policy.megatron_cfg.scheduler.end_weight_decay=0.5"
_STEP = "grpo.max_num_steps=1 checkpointing.enabled=false dppo.save_hf=false"

_SECTIONS: tuple[tuple[str, Probe, str], ...] = (
    (
        "checkpointing.",
        built.loop,
        """checkpoint_dir=FOLDER/elsewhere
        enabled=false
        save_period=3""",
    ),
    (
        "checkpointing.",
        built.checkpoints,
        f"""keep_top_k=1 | {_SAVED}
        metric_name=null | {_SAVED}
        higher_is_better=false | {_SAVED} checkpointing.keep_top_k=1
        save_optimizer=false | {_SAVED}""",
    ),
    ("checkpointing.", runs.stop_time, "checkpoint_must_save_by='00:00:30:00'"),
    ("cluster.", built.plan, "gpus_per_node=2\nnum_nodes=2"),
    (
        "data.train.",
        built.inputs,
        f"""data_path=FOLDER/others.jsonl
        dataset_name=math | ~data.train.data_path +data.train.dataset_name=gsm8k
        split=test | ~data.train.data_path +data.train.dataset_name=gsm8k
        input_key=question
        output_key=solution
        prompt_file=FOLDER/twice.txt
        system_prompt_file=FOLDER/system.txt
        split_validation_size=0.5 | data.validation=null
        seed=5 | {_SPLIT}""",
    ),
    (
        "data.validation.",
        built.inputs,
        """data_path=FOLDER/others.jsonl
        dataset_name=math | ~data.validation.data_path +data.validation.dataset_name=gsm8k
        split=test | ~data.validation.data_path +data.validation.dataset_name=gsm8k
        input_key=question
        output_key=solution
        prompt_file=FOLDER/twice.txt
        system_prompt_file=FOLDER/system.txt""",
    ),
    (
        "data.default.",
        built.inputs,
        f"""data_path=FOLDER/others.jsonl | {_UNSET}
        dataset_name=math | ~data.train.data_path ~data.validation.data_path +data.default.dataset_name=gsm8k
        split=test | ~data.train.data_path ~data.validation.data_path +data.default.dataset_name=gsm8k
        input_key=question
        output_key=solution
        prompt_file=FOLDER/twice.txt
        system_prompt_file=FOLDER/system.txt
        split_validation_size=0.5 | data.validation=null
        seed=5 | {_SPLIT}""",
    ),
    ("data.train.", runs.answers, "env_name=exact_match"),
    ("data.default.", runs.answers, "env_name=exact_match"),
    ("data.", built.loop, "shuffle=false"),
    ("data.", built.inputs, "max_input_seq_length=4"),
    (
        _DPPO,
        built.pruning,
        """enabled=false
        denominator=kept
        drop_zero_advantage=false
        sampler=bernoulli
        completion_pruning.enabled=false
        completion_pruning.policy=uniform
        completion_pruning.rate=0.25
        completion_pruning.score=surprise
        completion_pruning.scope=group | dppo.completion_pruning.policy=threshold
        completion_pruning.min_keep_probability=0.4
        prompt_pruning.enabled=false
        prompt_pruning.policy=uniform
        prompt_pruning.rate=0.6
        prompt_pruning.min_keep_probability=0.5 | dppo.prompt_pruning.policy=neyman
        prompt_pruning.ema_decay=0.1 | dppo.prompt_pruning.policy=neyman dppo.prompt_pruning.rate=0.6""",
    ),
    (
        "dppo.prompt_pruning.greso.",
        built.pruning,
        f"""initial_exploration=0.9 | {_GRESO}
        min_exploration=0.6 | {_GRESO}
        step=0.2 | {_GRESO}
        target_easy=0.9 | {_GRESO}
        target_hard=0.05 | {_GRESO}""",
    ),
    (_DPPO, built.loop, "prompt_pruning.refill=true"),
    (_DPPO, built.rows, "packing.window=2"),
    (_DPPO, built.step, "audit.period=1"),
    (
        _DPPO,
        runs.answers,
        f"""reward.function=exact_match
        reward.max_answer_chars=20
        reward.time_limit_seconds=2.0
        reward.num_workers=2 | {_OWN}
        reward.memory_gb=8.0 | {_OWN}""",
    ),
    ("env.", runs.answers, "math.num_workers=1"),
    (_DPPO, built.network, f"fp8_emulate=true | {_FP8}"),
    (_DPPO, runs.vllm_generator, f"rollout.engine=vllm\nrollout.time_limit_seconds=7.0 | {_VLLM}"),
    (_DPPO, built.plan, "rollout.max_cache_tokens=1024 | dppo.rollout.engine=embedded"),
    (_DPPO, built.loop, "rollout.replay_dir=FOLDER/replayed"),
    (
        _DPPO,
        runs.trained,
        f"""rollout.record_dir=FOLDER/samples | {_STEP}
        rollout.mismatch_warning=1e-12 | {_STEP} dppo.reward.function=tests.config.honoured_runs:count_letters
        save_hf=false | grpo.max_num_steps=1 checkpointing.enabled=false""",
    ),
    (
        "logger.",
        runs.trained,
        f"""log_dir=FOLDER/other | {_STEP}
        tensorboard_enabled=true | {_STEP}
        wandb_enabled=true | {_STEP}
        wandb.project=mine | {_STEP} logger.wandb_enabled=true
        wandb.name=mine | {_STEP} logger.wandb_enabled=true""",
    ),
    (_DPPO, runs.evaluated, "evaluation.datasets={some: FOLDER/rows.jsonl}\nevaluation.num_generations=2"),
    (_DPPO, runs.disk_errors, f"checkpoint.on_write_error=continue | {_SAVED}"),
    (_DPPO, runs.continuation, "checkpoint.accept_changed=[grpo.seed]"),
    (_DPPO, runs.skipped, "max_skipped_updates=5"),
    (
        _DPPO,
        built.network,
        f"virtual_pipeline_stages=2 | {_TWO_GPUS} policy.megatron_cfg.pipeline_model_parallel_size=2",
    ),
    (_DPPO, runs.limits, "watchdog.enabled=false\nwatchdog.min_seconds=10.0\nwatchdog.slowest_factor=3.0"),
    (
        "grpo.",
        built.rewards,
        f"""normalize_rewards=false
        use_leave_one_out_baseline=false
        advantage_clip_low=-0.5
        advantage_clip_high=0.5
        reward_scaling.enabled=true
        reward_scaling.source_min=-0.25 | {_SCALED}
        reward_scaling.source_max=1.5 | {_SCALED}
        reward_scaling.target_min=-1.0 | {_SCALED}
        reward_scaling.target_max=3.0 | {_SCALED}
        reward_shaping.enabled=true | grpo.reward_shaping.overlong_buffer_length=4
        reward_shaping.overlong_buffer_length=5 | {_SHAPED}
        reward_shaping.overlong_buffer_penalty=2.0 | {_SHAPED}
        reward_shaping.max_response_length=12 | {_SHAPED}
        reward_shaping.stop_properly_penalty_coef=0.5 | {_SHAPED}""",
    ),
    (
        "grpo.",
        built.loop,
        f"""num_prompts_per_step=4 | policy.train_global_batch_size=8
        num_generations_per_prompt=4
        max_num_epochs=2 | grpo.max_num_steps=100
        max_num_steps=3
        batch_multiplier=2 | grpo.use_dynamic_sampling=true {_NO_PROMPTS}
        use_dynamic_sampling=true | {_NO_PROMPTS}
        dynamic_sampling_max_gen_batches=3 | grpo.use_dynamic_sampling=true {_NO_PROMPTS}
        val_period=2
        val_at_start=true
        val_at_end=true
        val_num_generations_per_prompt=3
        seed=3""",
    ),
    ("grpo.", built.inputs, "max_val_samples=5"),
    ("grpo.", built.pruning, "overlong_filtering=true"),
    (
        "loss_fn.",
        built.loss,
        f"""reference_policy_kl_penalty=0.3
        reference_policy_kl_type=k1 | {_KL}
        kl_input_clamp_value=2.0 | {_KL}
        kl_output_clamp_value=3.0 | {_KL}
        ratio_clip_min=0.1
        ratio_clip_max=0.4
        ratio_clip_c=1.5
        use_on_policy_kl_approximation=true | {_KL}
        use_importance_sampling_correction=true
        truncated_importance_sampling_type=tis | {_TIS}
        truncated_importance_sampling_ratio=1.2 | {_TIS}
        truncated_importance_sampling_ratio_min=0.4 | {_TIS}
        sequence_level_importance_ratios=true
        use_cispo=true
        disable_ppo_ratio=true""",
    ),
    ("loss_fn.", built.pruning, f"token_level_loss=true | {_NO_PROMPTS}"),
    (
        "policy.generation.",
        built.loop,
        """max_new_tokens=5
        temperature=0.5
        val_temperature=0.0
        stop_token_ids=[3]""",
    ),
    (
        "policy.generation.",
        built.vllm_arguments,
        """vllm_cfg.precision=bfloat16
        vllm_cfg.tensor_parallel_size=2
        vllm_cfg.gpu_memory_utilization=0.3
        vllm_cfg.max_model_len=64
        vllm_cfg.enforce_eager=true
        vllm_cfg.kv_cache_dtype=fp8
        vllm_kwargs={max_num_seqs: 4}""",
    ),
    ("policy.", built.plan, "logprob_chunk_size=4\nmake_sequence_length_divisible_by=4"),
    ("policy.", built.optimizer, "max_grad_norm=0.5"),
    ("policy.", built.loop, "max_total_sequence_length=12\ntrain_global_batch_size=8"),
    ("policy.", built.network, "precision=bfloat16"),
    ("policy.", built.weight_stream, "refit_buffer_size_gb=0.5"),
    (
        "policy.",
        built.inputs,
        """model_name=FOLDER/copy
        tokenizer.name=FOLDER/copy
        tokenizer.chat_template=FOLDER/template.jinja | data.train.system_prompt_file=FOLDER/system.txt
        tokenizer.chat_template_kwargs={shout: true} | policy.tokenizer.chat_template=FOLDER/template.jinja""",
    ),
    (
        "policy.sequence_packing.",
        built.rows,
        """algorithm=concatenative
        train_mb_tokens=32""",
    ),
    ("policy.sequence_packing.", built.step, f"logprob_mb_tokens=16 | {_KL}"),
    (
        _MEGATRON,
        built.network,
        f"""tensor_model_parallel_size=2 | {_TWO_GPUS}
        pipeline_model_parallel_size=2 | {_TWO_GPUS}
        context_parallel_size=2 | {_TWO_GPUS}
        sequence_parallel=true | {_TWO_GPUS} policy.megatron_cfg.tensor_model_parallel_size=2
        num_layers_in_first_pipeline_stage=1 | {_TWO_GPUS} policy.megatron_cfg.pipeline_model_parallel_size=2
        num_layers_in_last_pipeline_stage=1 | {_TWO_GPUS} policy.megatron_cfg.pipeline_model_parallel_size=2
        activation_checkpointing=true
        recompute_granularity=selective | {_RECOMPUTED}
        recompute_modules=[mlp] | {_SELECTIVE}
        bias_activation_fusion=false""",
    ),
    (
        f"{_MEGATRON}fp8_cfg.",
        built.network,
        f"""enabled=true | {_BF16}
        fp8=hybrid | {_FP8}
        fp8_recipe=delayed | {_FP8}
        fp8_param=true | {_FP8}
        first_last_layers_bf16=true | {_FP8}
        num_layers_at_start_in_bf16=0 | {_LAYERS}
        num_layers_at_end_in_bf16=0 | {_LAYERS}""",
    ),
    (
        f"{_MEGATRON}optimizer.",
        built.optimizer,
        f"""lr=1e-3
        min_lr=1e-6 | {_DECAY} {_LINEAR}
        weight_decay=0.5
        adam_beta1=0.5
        adam_beta2=0.5
        adam_eps=1e-4
        use_distributed_optimizer=false""",
    ),
    (
        f"{_MEGATRON}scheduler.",
        built.optimizer,
        f"""lr_decay_style=cosine | {_DECAY}
        lr_decay_iters=18 | {_LINEAR}
        lr_warmup_iters=3
        lr_warmup_init=1e-7
        start_weight_decay=0.0 | {_RISING}
        end_weight_decay=0.5 | {_RISING}
        weight_decay_incr_style=cosine | {_RISING} {_HEAVIER}""",
    ),
    (
        f"{_MEGATRON}distributed_data_parallel_config.",
        built.reduction,
        """grad_reduce_in_fp32=true
        overlap_grad_reduce=false""",
    ),
)

TABLE = _table()

# Keys that say how others must be: the other value is an error. beside: what it then contradicts.
CHECKED = {
    "loss_fn.force_on_policy_ratio": ("loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=8"),
    "policy.generation.backend": ("policy.generation.backend=megatron", "dppo.rollout.engine=vllm"),
    "policy.megatron_cfg.pipeline_dtype": ("policy.megatron_cfg.pipeline_dtype=bfloat16", ""),
    "policy.megatron_cfg.optimizer.clip_grad": ("policy.megatron_cfg.optimizer.clip_grad=0.5", ""),
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Workshop]:
    """The tiny model, data beside it, and a mesh of one process."""
    with pytest.MonkeyPatch.context() as context, open_mesh(Layout(1, 1, 1, 1, False), seed=0) as mesh:
        folder = tmp_path_factory.mktemp("workshop")
        context.setenv(DIRECTORY_VARIABLE, str(folder))
        yield Workshop(folder, tiny_model, mesh)


def test_every_honoured_key_has_a_row_and_no_other_key_has() -> None:
    honoured = {key for key, row in registry().items() if class_of(row) == "honoured"}
    assert honoured == TABLE.keys() | CHECKED.keys()
    assert not TABLE.keys() & CHECKED.keys()


@pytest.mark.parametrize("key", TABLE)
def test_another_value_of_a_honoured_key_makes_a_difference(key: str, shop: Workshop) -> None:
    row, found = TABLE[key], []
    beside = row.beside.split()
    for number, overrides in enumerate((beside, [*beside, f"++{row.change}"])):
        loaded = shop.load([text.replace("NEW", f"{key}-{number}") for text in overrides])
        found.append(row.probe(shop, loaded))
    assert found[0] != found[1]


@pytest.mark.parametrize("key", CHECKED)
def test_another_value_of_a_key_that_others_must_agree_with_is_refused(key: str, shop: Workshop) -> None:
    change, beside = CHECKED[key]
    path = shop.folder / "run.yaml"
    assert examine(path, beside.split()).errors == ()
    assert [error.key for error in examine(path, [*beside.split(), change]).errors] == [key]


@pytest.mark.parametrize("metric", ["val:accuracy", None])
def test_checkpoints_are_ranked_by_accuracy_or_by_nothing(tmp_path: Path, metric: str | None) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    config = load_config(path, [f"checkpointing.metric_name={metric or 'null'}"]).config
    assert config.checkpointing.metric_name == metric
    assert not examine(path, [f"checkpointing.metric_name={metric or 'null'}"]).errors
    assert examine(path, ["checkpointing.metric_name=val:total_reward/mean"]).errors
