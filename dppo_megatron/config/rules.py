"""The rules of a configuration that types cannot say: ranges, and keys that contradict each other."""

import math
from collections.abc import Callable, Iterator
from operator import attrgetter

from dppo_megatron.config.duration import parse_duration
from dppo_megatron.config.schema import Config
from dppo_megatron.plan import (
    Problems,
    batch_arithmetic,
    batch_problems,
    layout_problems,
    padding_multiples,
    raise_problems,
    resolve_layout,
    token_alignment,
)

_MEGATRON = "policy.megatron_cfg"


def check_config(config: Config) -> None:
    """Check the rules that types cannot say: ranges, and keys that contradict each other.

    Raises: ValueError with one line a problem: key, value, what is allowed.
    """
    raise_problems(f"{key} = {value!r}: {allowed}" for key, value, allowed in find_problems(config))


def find_problems(config: Config) -> Iterator[tuple[str, object, str]]:
    """Key, value and what is allowed, of every rule that a configuration breaks."""
    for rule in _RULES:
        for key, allowed in rule(config):
            yield key, attrgetter(key)(config), allowed


def _range_problems(config: Config) -> Problems:
    for allowed, holds, keys in _RANGES:
        for key in keys.split():
            value = attrgetter(key)(config)
            if value is not None and not (math.isfinite(value) and holds(value)):
                yield key, f"must be {allowed}" if math.isfinite(value) else "must be finite"


def _size_problems(config: Config) -> Problems:
    grpo, size = config.grpo, config.policy.train_global_batch_size
    yield from layout_problems(config.cluster, megatron=config.policy.megatron_cfg)
    if config.dppo.virtual_pipeline_stages > 1 and config.policy.megatron_cfg.pipeline_model_parallel_size < 2:
        yield "dppo.virtual_pipeline_stages", f"needs {_MEGATRON}.pipeline_model_parallel_size of at least 2"
    problems = list(batch_problems(grpo, train_global_batch_size=size))
    yield from problems
    if problems or not config.loss_fn.force_on_policy_ratio:
        return
    steps = batch_arithmetic(grpo, train_global_batch_size=size).num_minibatches
    if steps != 1:
        allowed = f"needs one optimizer step a rollout batch; policy.train_global_batch_size makes it {steps}"
        yield "loss_fn.force_on_policy_ratio", allowed


def _sampling_problems(config: Config) -> Problems:
    generation = config.policy.generation
    if generation.backend == "megatron" and config.dppo.rollout.engine != "embedded":
        yield "policy.generation.backend", "must be vllm, unless dppo.rollout.engine is embedded"


def _engine_problems(config: Config) -> Problems:
    if config.dppo.rollout.engine != "vllm":
        return
    engine, key = config.policy.generation.vllm_cfg, "policy.generation.vllm_cfg"
    processes = config.cluster.gpus_per_node * config.cluster.num_nodes
    if processes % engine.tensor_parallel_size:
        yield f"{key}.tensor_parallel_size", f"must divide the run's {processes} processes"
    total = config.policy.max_total_sequence_length
    if engine.max_model_len < total:
        yield f"{key}.max_model_len", f"must be at least policy.max_total_sequence_length, {total}"


def _length_problems(config: Config) -> Problems:
    megatron, limit = config.policy.megatron_cfg, config.policy.max_total_sequence_length
    total = f"policy.max_total_sequence_length = {limit}"
    if config.policy.generation.max_new_tokens > limit:
        yield "policy.generation.max_new_tokens", f"must be at most {total}"
    if (config.data.max_input_seq_length or 0) > limit:
        yield "data.max_input_seq_length", f"must be at most {total}"
    if any(layout_problems(config.cluster, megatron=megatron)):
        return
    layout = resolve_layout(config.cluster, megatron=megatron, virtual_pp=config.dppo.virtual_pipeline_stages)
    divisor = max(config.policy.make_sequence_length_divisible_by, 1)
    multiple = padding_multiples(layout, sequence_divisor=divisor, alignment=token_alignment(megatron.fp8_cfg)).row
    longest = -(-limit // multiple) * multiple
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        if getattr(config.policy.sequence_packing, name) < longest:
            need = f"{longest} tokens when padded to a multiple of {multiple}"
            yield f"policy.sequence_packing.{name}", f"must hold one sequence of {total}, {need}"


def _reward_problems(config: Config) -> Problems:
    grpo = config.grpo
    scaling, shaping = grpo.reward_scaling, grpo.reward_shaping
    if scaling.source_min >= scaling.source_max:
        yield "grpo.reward_scaling.source_min", f"must be below source_max, {scaling.source_max}"
    if shaping.enabled and shaping.stop_properly_penalty_coef is None:
        for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"):
            if getattr(shaping, name) is None:
                yield (
                    f"grpo.reward_shaping.{name}",
                    "must be given, or grpo.reward_shaping.stop_properly_penalty_coef",
                )
        if (shaping.overlong_buffer_length or 0) > (shaping.max_response_length or math.inf):
            allowed = f"must be at most max_response_length, {shaping.max_response_length}"
            yield "grpo.reward_shaping.overlong_buffer_length", allowed
    if grpo.batch_multiplier != 1 and not grpo.use_dynamic_sampling:
        yield "grpo.batch_multiplier", "must be 1 without grpo.use_dynamic_sampling"
    if not grpo.use_dynamic_sampling:
        return
    prompts = config.dppo.prompt_pruning
    if config.dppo.enabled and prompts.enabled and prompts.policy not in ("top", "greso"):
        yield (
            "grpo.use_dynamic_sampling",
            f"stops on realised groups, which would bias dppo.prompt_pruning.policy {prompts.policy};"
            " use greso, or dppo.prompt_pruning.enabled: false",
        )
    if config.dppo.rollout.replay_dir is not None or config.dppo.audit.period:
        yield "grpo.use_dynamic_sampling", "works neither with dppo.rollout.replay_dir nor with dppo.audit.period"


def _denominator_problems(config: Config) -> Problems:
    dppo, key = config.dppo, "dppo.denominator"
    prunes_prompts = dppo.enabled and dppo.prompt_pruning.enabled
    if not config.loss_fn.token_level_loss:
        if dppo.denominator in ("constant", "estimated_tokens"):
            yield key, "counts tokens, which loss_fn.token_level_loss = False contradicts; use candidates"
    elif dppo.denominator == "candidates" and prunes_prompts:
        yield (
            key,
            "the tokens of pruned prompts cannot be counted for a token mean (loss_fn.token_level_loss = True);"
            " use the sequence mean (loss_fn.token_level_loss: false), dppo.denominator: constant,"
            " or, accepting a ratio estimator, dppo.denominator: estimated_tokens",
        )
    # Without pruning at all the estimate is the count, so that turning dppo off needs no second change.
    elif dppo.denominator == "estimated_tokens" and dppo.enabled and not prunes_prompts:
        yield key, "needs dppo.prompt_pruning.enabled; without it candidates is exact"


def _loss_problems(config: Config) -> Problems:
    loss = config.loss_fn
    kind, high, low = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio,
        loss.truncated_importance_sampling_ratio_min,
    )
    key = "loss_fn.truncated_importance_sampling"
    if kind is not None and not loss.use_importance_sampling_correction:
        yield f"{key}_type", "needs loss_fn.use_importance_sampling_correction: true"
    if (kind is None) != (high is None):
        yield f"{key}_ratio", f"stands with {key}_type alone, which is {kind!r}"
    if low is None and kind in ("icepop", "seq-mask-tis"):
        yield f"{key}_ratio_min", f"must be given for {key}_type {kind}"
    if low is not None and (high is None or low > high):
        yield f"{key}_ratio_min", f"must be at most {key}_ratio, {high}"
    if loss.sequence_level_importance_ratios:
        if kind == "seq-mask-tis":
            yield f"{key}_type", "corrects token by token, which loss_fn.sequence_level_importance_ratios contradicts"
        if loss.token_level_loss:
            yield "loss_fn.sequence_level_importance_ratios", "needs a sequence mean, loss_fn.token_level_loss: false"
    for name in ("use_cispo", "disable_ppo_ratio"):
        if getattr(loss, name) and loss.ratio_clip_c is not None:
            yield "loss_fn.ratio_clip_c", f"bounds the ratio's term, which loss_fn.{name} replaces; must be null"
    if loss.disable_ppo_ratio:
        for name in ("use_cispo", "sequence_level_importance_ratios"):
            if getattr(loss, name):
                yield f"loss_fn.{name}", "contradicts loss_fn.disable_ppo_ratio"


def _pruning_problems(config: Config) -> Problems:
    dppo, completions = config.dppo, config.dppo.completion_pruning
    for name, level in (("prompt_pruning", dppo.prompt_pruning), ("completion_pruning", completions)):
        least = level.min_keep_probability
        # 1 - 0.9 is less than 0.1 in floating point.
        too_high = 1 - level.rate < least and not math.isclose(1 - level.rate, least)
        if dppo.enabled and level.enabled and level.policy not in ("top", "greso") and too_high:
            yield f"dppo.{name}.rate", f"must be at most 1 - dppo.{name}.min_keep_probability, 1 - {least}"
    if completions.scope == "group" and completions.policy != "threshold":
        yield "dppo.completion_pruning.scope", f"is for policy threshold, not {completions.policy}; use batch"


def _training_problems(config: Config) -> Problems:
    policy, megatron = config.policy, config.policy.megatron_cfg
    if config.checkpointing.metric_name not in (None, "val:accuracy"):
        yield "checkpointing.metric_name", "must be val:accuracy, or null to keep the newest"
    if megatron.pipeline_dtype != policy.precision:
        yield f"{_MEGATRON}.pipeline_dtype", f"must equal policy.precision, {policy.precision}"
    if megatron.optimizer.clip_grad != policy.max_grad_norm:
        allowed = f"must equal policy.max_grad_norm, {policy.max_grad_norm}; write ${{policy.max_grad_norm}}"
        yield f"{_MEGATRON}.optimizer.clip_grad", allowed
    low, high = config.grpo.advantage_clip_low, config.grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield "grpo.advantage_clip_low", f"must be at most grpo.advantage_clip_high, {high}"


def _fp8_problems(config: Config) -> Problems:
    fp8, key = config.policy.megatron_cfg.fp8_cfg, f"{_MEGATRON}.fp8_cfg"
    if fp8.fp8_param and not fp8.enabled:
        yield f"{key}.fp8_param", f"needs {key}.enabled: true"
    rehearsed = config.dppo.fp8_emulate
    if rehearsed and not fp8.enabled:
        yield "dppo.fp8_emulate", f"needs {key}.enabled: true, whose recipe it rehearses"
    if not fp8.enabled:
        return
    if config.policy.precision != "bfloat16" and not rehearsed:
        allowed = f"needs policy.precision: bfloat16, not {config.policy.precision}, or dppo.fp8_emulate: true"
        yield f"{key}.enabled", allowed
    if rehearsed and fp8.fp8_recipe == "delayed" and config.policy.megatron_cfg.activation_checkpointing:
        allowed = "must be false to rehearse fp8_recipe: delayed: what is computed again would meet newer scales"
        yield f"{_MEGATRON}.activation_checkpointing", allowed
    if fp8.first_last_layers_bf16 and fp8.fp8_recipe == "delayed":
        yield f"{key}.first_last_layers_bf16", "is not for fp8_recipe: delayed, whose scales all layers share"


def _time_problems(config: Config) -> Problems:
    limit = config.checkpointing.checkpoint_must_save_by
    if limit is None:
        return
    try:
        parse_duration(limit)
    except ValueError as error:
        yield "checkpointing.checkpoint_must_save_by", str(error)


def _learning_rate_problems(config: Config) -> Problems:
    lr, scheduler = config.policy.megatron_cfg.optimizer.lr, config.policy.megatron_cfg.scheduler
    for key in (f"{_MEGATRON}.optimizer.min_lr", f"{_MEGATRON}.scheduler.lr_warmup_init"):
        if attrgetter(key)(config) > lr:
            yield key, f"must be at most {_MEGATRON}.optimizer.lr, {lr}"
    if scheduler.lr_decay_iters is not None and scheduler.lr_warmup_iters >= scheduler.lr_decay_iters:
        key = f"{_MEGATRON}.scheduler.lr_warmup_iters"
        yield key, f"must be below lr_decay_iters, {scheduler.lr_decay_iters}"


# What may be null is the schema's to say: null is in every range.
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        """grpo.num_prompts_per_step grpo.max_num_epochs grpo.max_num_steps grpo.max_val_samples
        grpo.val_num_generations_per_prompt checkpointing.save_period checkpointing.keep_top_k
        policy.train_global_batch_size policy.make_sequence_length_divisible_by
        policy.max_total_sequence_length policy.logprob_chunk_size policy.generation.max_new_tokens
        policy.sequence_packing.train_mb_tokens policy.sequence_packing.logprob_mb_tokens
        grpo.dynamic_sampling_max_gen_batches grpo.batch_multiplier grpo.reward_shaping.overlong_buffer_length
        grpo.reward_shaping.max_response_length
        policy.megatron_cfg.tensor_model_parallel_size policy.megatron_cfg.pipeline_model_parallel_size
        policy.megatron_cfg.context_parallel_size policy.megatron_cfg.scheduler.lr_decay_iters
        data.max_input_seq_length env.math.num_workers cluster.gpus_per_node cluster.num_nodes
        dppo.packing.window dppo.reward.max_answer_chars dppo.reward.num_workers dppo.rollout.max_cache_tokens
        policy.generation.vllm_cfg.tensor_parallel_size dppo.max_skipped_updates dppo.watchdog.slowest_factor
        dppo.virtual_pipeline_stages""",
    ),
    (
        "at least 2: a group of one has no advantage",
        lambda value: value >= 2,
        "grpo.num_generations_per_prompt",
    ),
    ("a period, or 0 or -1 for never", lambda value: value >= -1, "grpo.val_period"),
    (
        "above 0",
        lambda value: value > 0,
        """policy.generation.temperature policy.refit_buffer_size_gb policy.megatron_cfg.optimizer.lr
        policy.megatron_cfg.optimizer.adam_eps loss_fn.kl_input_clamp_value loss_fn.kl_output_clamp_value
        dppo.reward.time_limit_seconds dppo.reward.memory_gb dppo.rollout.time_limit_seconds
        dppo.rollout.mismatch_warning
        dppo.watchdog.min_seconds
        loss_fn.truncated_importance_sampling_ratio""",
    ),
    (
        "at least 0",
        lambda value: value >= 0,
        """loss_fn.reference_policy_kl_penalty loss_fn.ratio_clip_min loss_fn.ratio_clip_max
        policy.max_grad_norm policy.generation.val_temperature
        policy.megatron_cfg.optimizer.min_lr policy.megatron_cfg.optimizer.weight_decay
        policy.megatron_cfg.scheduler.lr_warmup_iters policy.megatron_cfg.scheduler.lr_warmup_init
        policy.megatron_cfg.fp8_cfg.num_layers_at_start_in_bf16
        policy.megatron_cfg.fp8_cfg.num_layers_at_end_in_bf16
        policy.megatron_cfg.scheduler.start_weight_decay policy.megatron_cfg.scheduler.end_weight_decay
        dppo.audit.period loss_fn.truncated_importance_sampling_ratio_min
        grpo.reward_shaping.overlong_buffer_penalty""",
    ),
    ("above 1", lambda value: value > 1, "loss_fn.ratio_clip_c"),
    (
        "at least 0 and below 1",
        lambda value: 0 <= value < 1,
        """data.train.split_validation_size
        policy.megatron_cfg.optimizer.adam_beta1 policy.megatron_cfg.optimizer.adam_beta2
        dppo.prompt_pruning.rate dppo.prompt_pruning.ema_decay dppo.completion_pruning.rate""",
    ),
    (
        "at least 0 and at most 1",
        lambda value: 0 <= value <= 1,
        """grpo.reward_shaping.stop_properly_penalty_coef dppo.prompt_pruning.greso.initial_exploration
        dppo.prompt_pruning.greso.step dppo.prompt_pruning.greso.target_easy
        dppo.prompt_pruning.greso.target_hard""",
    ),
    (
        "above 0 and at most 1",
        lambda value: 0 < value <= 1,
        """dppo.prompt_pruning.greso.min_exploration
        dppo.prompt_pruning.min_keep_probability dppo.completion_pruning.min_keep_probability
        policy.generation.vllm_cfg.gpu_memory_utilization""",
    ),
)

RANGE_TEXTS = frozenset(f"must be {allowed}" for allowed, _, _ in _RANGES)
"""What is said of a value outside its range, whatever the others are."""

_RULES: tuple[Callable[[Config], Problems], ...] = (
    _range_problems,
    _size_problems,
    _sampling_problems,
    _engine_problems,
    _length_problems,
    _loss_problems,
    _reward_problems,
    _denominator_problems,
    _pruning_problems,
    _training_problems,
    _learning_rate_problems,
    _time_problems,
    _fp8_problems,
)
