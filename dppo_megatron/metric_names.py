"""Names of the logged metrics; NeMo-RL's name where the quantity is the same, ``dppo/`` where it is ours."""

from types import MappingProxyType
from typing import Final

# A step of training.
REWARD: Final = "train/reward"  # mean reward of the step's completions, before any is dropped
LOSS: Final = "train/loss"  # the objective, after the division by its denominator
GRAD_NORM: Final = "train/grad_norm"  # before clipping
LEARNING_RATE: Final = "train/lr"  # of the step's last update
IDLE_UPDATES: Final = "dppo/idle_updates"  # not taken, because nothing that was kept has a gradient
SKIPPED_UPDATES: Final = "dppo/skipped_updates"  # those whose loss or gradients were not finite
TRAIN_TOKENS: Final = "train/global_valid_toks"  # completion tokens trained on

# The loss: means over the trained tokens.
PROBS_RATIO: Final = "train/probs_ratio"  # policy / old policy
PROBS_RATIO_CLAMPED: Final = "train/probs_ratio_clamped"  # the same inside the clip range
CLIPPED_FRACTION: Final = "dppo/clipped_fraction"  # tokens whose ratio lies outside the clip range
KL_PENALTY: Final = "train/kl_penalty"  # divergence from the reference policy, before its coefficient
SURPRISAL: Final = "dppo/surprisal"  # -log-prob of the sampled tokens, nats

# Trainer against sampler: both must say the same of the sampled tokens.
SAMPLER_MISMATCH: Final = "dppo/sampler_mismatch"  # mean of exp(|log-prob difference|) - 1; 0 is equal
GEN_KL_ERROR: Final = "train/gen_kl_error"  # KL(sampler || trainer), k3 estimate, nats a token
IMPORTANCE_RATIO: Final = "train/sampling_importance_ratio"  # trainer / sampler, as bounded
IMPORTANCE_OUT_OF_BOUNDS: Final = "train/is_oob_ratio"  # tokens whose weight the bounds changed

LOSS_METRICS: Final = MappingProxyType(  # by the loss's own names
    {
        "ratio": PROBS_RATIO,
        "ratio_clamped": PROBS_RATIO_CLAMPED,
        "clipped": CLIPPED_FRACTION,
        "kl_penalty": KL_PENALTY,
        "surprisal": SURPRISAL,
        "sampler_mismatch": SAMPLER_MISMATCH,
        "sampler_mismatch_kl": GEN_KL_ERROR,
        "importance_ratio": IMPORTANCE_RATIO,
        "importance_out_of_bounds": IMPORTANCE_OUT_OF_BOUNDS,
    }
)

# Rollouts.
MEAN_PROMPT_LENGTH: Final = "train/mean_prompt_length"  # tokens
MEAN_GENERATED_TOKENS: Final = "train/mean_gen_tokens_per_sample"  # tokens a completion
TRUNCATION_RATE: Final = "train/truncation_rate"  # fraction of completions cut at the limit
REWARD_FAILURES: Final = "dppo/reward_failures"  # answers that got no verdict, of all ranks
ROLLOUT_TOKENS: Final = "dppo/rollout_tokens"  # completion tokens sampled for training

# Pruning.
KEPT_FRACTION: Final = "dppo/kept_fraction"  # completions trained on / completions sampled
KEPT_PROMPTS_FRACTION: Final = "dppo/kept_prompts_fraction"  # prompts sampled for / candidate prompts
TRAIN_TOKENS_WITHOUT_PRUNING: Final = "dppo/train_tokens_without_pruning"  # had nothing been dropped; an estimate
WEIGHT_MEAN: Final = "dppo/weight_mean"  # of the kept completions
WEIGHT_MAX: Final = "dppo/weight_max"  # of the kept completions
EFFECTIVE_SAMPLE_SIZE: Final = "dppo/effective_sample_size"  # (sum w)^2 / sum w^2, completions
CANDIDATE_PROMPTS: Final = "dppo/candidate_prompts"  # prompts before pruning
KEPT_PROMPTS: Final = "dppo/kept_prompts"  # prompts sampled for
KEPT_COMPLETIONS: Final = "dppo/kept_completions"  # completions trained on
DROPPABLE_COMPLETIONS: Final = (
    "dppo/droppable_completions"  # completions whose term is identically zero, dropped free
)
PROMPT_VARIANCE: Final = "dppo/prompt_variance_factor"  # the paper's factor, of dropping prompts
PROMPT_VARIANCE_PER_CANDIDATE: Final = "dppo/prompt_variance_per_candidate"  # mean of 1 / p of prompts
COMPLETION_VARIANCE: Final = "dppo/completion_variance_factor"  # the paper's factor, of dropping completions
COMPLETION_VARIANCE_PER_CANDIDATE: Final = "dppo/completion_variance_per_candidate"  # mean of 1 / p, p = 0 left out
TOKENS_SAVED_BY_PROMPTS: Final = (
    "dppo/tokens_saved_by_prompt_pruning"  # never sampled, hence not trained; an estimate
)
TOKENS_SAVED_BY_COMPLETIONS: Final = "dppo/tokens_saved_by_completion_pruning"  # sampled, not trained

# The audit, in the steps that have one: the estimated gradient against the full one, on a fixed random projection.
AUDIT_COSINE: Final = "dppo/audit/cosine"  # of this step
AUDIT_ERROR: Final = "dppo/audit/relative_error"  # of this step
AUDIT_MEAN_COSINE: Final = "dppo/audit/mean_cosine"  # of the running means
AUDIT_MEAN_ERROR: Final = "dppo/audit/mean_relative_error"  # of the running means
AUDIT_STANDARD_ERROR: Final = "dppo/audit/mean_standard_error"  # what that error is about without bias

# Packing.
ROWS: Final = "dppo/rows"  # THD rows of each data-parallel rank, of padding alone included
PACKED_DENSITY: Final = "dppo/packed_density"  # tokens / capacity of the rows, before they are shared out
SHARED_DENSITY: Final = "dppo/shared_density"  # the same after: ranks have equally many rows
TOKEN_DENSITY: Final = "dppo/token_density"  # tokens / tokens with padding
SEQUENCE_PADDING: Final = "dppo/sequence_padding"  # tokens of padding, because the layout cuts sequences
ROW_PADDING: Final = "dppo/row_padding"  # tokens of padding, because it cuts rows; rows of padding alone included
TOKEN_IMBALANCE: Final = "dppo/token_imbalance"  # most over mean of the data-parallel ranks' tokens
ATTENTION_IMBALANCE: Final = "dppo/attention_imbalance"  # the same of their sums of squared lengths

# Speed, over all processes.
ROLLOUT_TOKENS_PER_SECOND: Final = "performance/rollout_tokens_per_second"  # completion tokens / sampling seconds
TRAIN_TOKENS_PER_SECOND: Final = (
    "performance/train_tokens_per_second"  # prompt and completion tokens / update seconds
)
TOKENS_PER_SECOND: Final = "performance/tokens_per_second"  # completion tokens sampled / seconds of the step
TRAIN_FLOPS_PER_SECOND: Final = "performance/train_flops_per_second"  # of the model's matrix products, in the update
TRAIN_UTILISATION: Final = "performance/train_utilisation"  # the same / the devices' peak, where that is known

# Validation.
ACCURACY: Final = "validation/accuracy"  # mean validation reward after the step
ACCURACY_BEFORE: Final = "validation/accuracy_before"  # the same before the run's first step

# Wall seconds.
STEP_SECONDS: Final = "timing/train/total_step_time"  # the whole step
STAGE_SECONDS: Final = (  # by stage, in the order of stage_clock.STAGES
    "timing/train/weight_sync",
    "timing/train/generation",
    "timing/train/reward_calculation",
    "timing/train/pruning",
    "timing/train/packing",
    "timing/train/policy_and_reference_logprobs",
    "timing/train/policy_training",
    "timing/validation/total_validation_time",
    "timing/train/checkpointing",
    "timing/train/other",
)
