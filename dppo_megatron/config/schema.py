"""The configuration, as frozen sections: NeMo-RL's names, and one block ``dppo`` of our own.

Defaults live here and nowhere else. A key that is not here is unknown, and an error.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from dppo_megatron.config.fp8 import Fp8Config
from dppo_megatron.config.generation_schema import GenerationConfig, follows
from dppo_megatron.config.logger_section import LoggerConfig
from dppo_megatron.config.reward_section import RewardConfig


@dataclass(frozen=True)
class RewardScalingConfig:
    """``grpo.reward_scaling``: rewards clipped to [source_min, source_max], then mapped to the target's range."""

    enabled: bool = False
    source_min: float = 0.0
    source_max: float = 1.0
    target_min: float = 0.0
    target_max: float = 1.0


@dataclass(frozen=True)
class RewardShapingConfig:
    """``grpo.reward_shaping``: DAPO's penalty of overlong completions, or a factor for truncated ones."""

    enabled: bool = False
    overlong_buffer_length: int | None = 128
    overlong_buffer_penalty: float | None = 1.0
    max_response_length: int | None = follows("policy.max_total_sequence_length")
    stop_properly_penalty_coef: float | None = None


@dataclass(frozen=True)
class GrpoConfig:
    """``grpo``: sizes, validation, rewards, advantages, dynamic sampling."""

    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 16
    max_num_epochs: int = 1
    max_num_steps: int = 1_000_000
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    overlong_filtering: bool = False
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    reward_scaling: RewardScalingConfig = field(default_factory=RewardScalingConfig)
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    use_dynamic_sampling: bool = False
    dynamic_sampling_max_gen_batches: int = 10
    batch_multiplier: int = 1
    val_period: int = 10
    val_at_start: bool = False
    val_at_end: bool = False
    max_val_samples: int = 256
    val_num_generations_per_prompt: int = 1
    seed: int = 42


@dataclass(frozen=True)
class LossConfig:
    """``loss_fn``: the surrogate."""

    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    use_on_policy_kl_approximation: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    sequence_level_importance_ratios: bool = False
    token_level_loss: bool = True
    force_on_policy_ratio: bool = False
    use_cispo: bool = False
    disable_ppo_ratio: bool = False


@dataclass(frozen=True)
class CheckpointingConfig:
    """``checkpointing``: where and how often."""

    enabled: bool = True
    checkpoint_dir: str = "results/grpo"
    save_period: int = 10
    keep_top_k: int | None = 3
    metric_name: str | None = "val:accuracy"
    higher_is_better: bool = True
    save_optimizer: bool = True
    checkpoint_must_save_by: str | None = None


@dataclass(frozen=True)
class TokenizerConfig:
    """``policy.tokenizer``."""

    name: str = follows("policy.model_name")
    chat_template: str | None = "default"
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class SequencePackingConfig:
    """``policy.sequence_packing``: caps of a THD row, padded tokens."""

    train_mb_tokens: int = 4096
    logprob_mb_tokens: int = follows("policy.sequence_packing.train_mb_tokens")
    algorithm: Literal[
        "window_greedy",
        "best_fit_decreasing",
        "first_fit_decreasing",
        "modified_first_fit_decreasing",
        "first_fit_shuffle",
        "concatenative",
    ] = "modified_first_fit_decreasing"


@dataclass(frozen=True)
class OptimizerConfig:
    """``policy.megatron_cfg.optimizer``."""

    lr: float = 5.0e-6
    min_lr: float = 5.0e-7
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    use_distributed_optimizer: bool = True
    clip_grad: float = follows("policy.max_grad_norm")


@dataclass(frozen=True)
class SchedulerConfig:
    """``policy.megatron_cfg.scheduler``, in optimizer steps."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    lr_decay_iters: int | None = 1000
    lr_warmup_iters: int = 13
    lr_warmup_init: float = 5.0e-7
    start_weight_decay: float = follows("policy.megatron_cfg.optimizer.weight_decay")
    end_weight_decay: float = follows("policy.megatron_cfg.optimizer.weight_decay")
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """``policy.megatron_cfg.distributed_data_parallel_config``."""

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = True


@dataclass(frozen=True)
class MegatronConfig:
    """``policy.megatron_cfg``: layout and training."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    pipeline_dtype: str = follows("policy.precision")
    activation_checkpointing: bool = False
    recompute_granularity: Literal["full", "selective"] = "full"
    recompute_modules: tuple[str, ...] | None = None
    bias_activation_fusion: bool = True
    fp8_cfg: Fp8Config = field(default_factory=Fp8Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    distributed_data_parallel_config: DistributedDataParallelConfig = field(
        default_factory=DistributedDataParallelConfig
    )


@dataclass(frozen=True)
class PolicyConfig:
    """``policy``: model, batch sizes, layout, generation."""

    model_name: str
    train_global_batch_size: int = 512
    max_total_sequence_length: int = 512
    make_sequence_length_divisible_by: int = 1
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    logprob_chunk_size: int | None = None
    refit_buffer_size_gb: float = 1.0
    max_grad_norm: float = 1.0
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)


@dataclass(frozen=True)
class DatasetConfig:
    """``data.validation``: a JSONL file and how its rows become prompts.

    dataset_name, split: a public set by its name, whose ``data_path`` ``named_sets`` knows; else null.
    """

    data_path: str
    dataset_name: str | None = None
    split: str | None = None
    input_key: str = "input"
    output_key: str = "output"
    prompt_file: str | None = None
    system_prompt_file: str | None = None


@dataclass(frozen=True)
class TrainDatasetConfig(DatasetConfig):
    """``data.train``: a data set with its reward, and what of it is set aside for validation."""

    env_name: str = "math"
    split_validation_size: float = 0.0
    seed: int = follows("grpo.seed")


@dataclass(frozen=True)
class DataConfig:
    """``data``; ``default`` fills what ``train`` and ``validation`` leave open."""

    train: TrainDatasetConfig
    validation: DatasetConfig | None = None
    shuffle: bool = True
    max_input_seq_length: int | None = follows("policy.max_total_sequence_length")


@dataclass(frozen=True)
class MathEnvConfig:
    """``env.math``: killable worker processes of each rank."""

    num_workers: int = 2


@dataclass(frozen=True)
class EnvConfig:
    """``env``."""

    math: MathEnvConfig = field(default_factory=MathEnvConfig)


@dataclass(frozen=True)
class ClusterConfig:
    """``cluster``: processes."""

    gpus_per_node: int = 1
    num_nodes: int = 1


@dataclass(frozen=True)
class GresoConfig:
    """``dppo.prompt_pruning.greso``: what policy greso knows instead of a rate.

    ``easy``: groups all right, ``hard``: all wrong. A prompt after z groups of equal rewards in a row is kept with
    probability max(p^z, min_exploration), p moving by ``step`` a training step towards the target shares.
    """

    initial_exploration: float = 0.5
    min_exploration: float = 0.01
    step: float = 0.01
    target_easy: float = 1 / 12
    target_hard: float = 1 / 6


@dataclass(frozen=True)
class PromptPruningConfig:
    """``dppo.prompt_pruning``: before generation, on the history."""

    enabled: bool = True
    policy: Literal["threshold", "neyman", "uniform", "top", "greso"] = "threshold"
    rate: float = 0.3
    ema_decay: float = 0.9
    min_keep_probability: float = 0.2
    refill: bool = False
    greso: GresoConfig = field(default_factory=GresoConfig)


@dataclass(frozen=True)
class CompletionPruningConfig:
    """``dppo.completion_pruning``: after rewards, before the update."""

    enabled: bool = True
    policy: Literal["neyman", "threshold", "uniform", "top"] = "neyman"
    score: Literal["advantage", "surprise"] = "advantage"
    rate: float = 0.5
    scope: Literal["batch", "group"] = "batch"
    min_keep_probability: float = 0.05


@dataclass(frozen=True)
class PackingConfig:
    """``dppo.packing``: null packs the whole batch at once, an integer is the paper's window."""

    window: int | None = None


@dataclass(frozen=True)
class AuditConfig:
    """``dppo.audit``: every ``period`` steps the full-batch gradient too; 0 is never."""

    period: int = 0


@dataclass(frozen=True)
class RolloutConfig:
    """``dppo.rollout``: engine, record, replay.

    engine: ``auto`` is vLLM on GPUs and the embedded engine elsewhere.
    max_cache_tokens: bounds the embedded engine's batches, and vLLM's key-value cache off the GPU.
    time_limit_seconds: of a step's rollouts on vLLM; past it the engine counts as hung.
    mismatch_warning: ``dppo/sampler_mismatch`` above which the log names the usual causes.
    """

    engine: Literal["auto", "embedded", "vllm"] = "auto"
    max_cache_tokens: int = 262_144
    time_limit_seconds: float = 1200.0
    mismatch_warning: float = 0.05
    record_dir: str | None = None
    replay_dir: str | None = None


@dataclass(frozen=True)
class CheckpointSafetyConfig:
    """``dppo.checkpoint``: what a checkpoint that cannot be written does to the run, and what may change since.

    ``accept_changed``: keys, as the refusal names them, that may differ from the checkpoint's.
    """

    on_write_error: Literal["stop", "continue"] = "stop"
    accept_changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationConfig:
    """``dppo.evaluation``: for ``dppo eval``. datasets: by name, a JSONL file; null takes ``data.validation``."""

    datasets: dict[str, Any] | None = None
    num_generations: int = 1


@dataclass(frozen=True)
class WatchdogConfig:
    """``dppo.watchdog``: a stage's limit is slowest_factor times its slowest so far, and at least min_seconds."""

    enabled: bool = True
    min_seconds: float = 1500.0
    slowest_factor: float = 10.0


@dataclass(frozen=True)
class DppoConfig:
    """``dppo``: all that is ours. Absent from a file: ``enabled`` is false, plain GRPO."""

    enabled: bool = True
    denominator: Literal["candidates", "constant", "estimated_tokens", "kept"] = "candidates"
    sampler: Literal["systematic", "bernoulli"] = "systematic"
    drop_zero_advantage: bool = True
    prompt_pruning: PromptPruningConfig = field(default_factory=PromptPruningConfig)
    completion_pruning: CompletionPruningConfig = field(default_factory=CompletionPruningConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    checkpoint: CheckpointSafetyConfig = field(default_factory=CheckpointSafetyConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    virtual_pipeline_stages: int = 1
    max_skipped_updates: int = 3
    fp8_emulate: bool = False
    save_hf: bool = True


@dataclass(frozen=True)
class Config:
    """The whole configuration, resolved."""

    policy: PolicyConfig
    data: DataConfig
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    loss_fn: LossConfig = field(default_factory=LossConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    dppo: DppoConfig = field(default_factory=lambda: DppoConfig(enabled=False))
