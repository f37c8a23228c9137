"""The policy loss: one pure function of a row's tensors, returning sums.

The term of a sampled token with ratio r = exp(logp - old logp) and advantage A is

    -min(r A, clip(r, 1 - low, 1 + high) A)      and, for A < 0, no larger than -c A (dual clip)

times the importance weight of the trainer over the sampler, plus the KL penalty. Variants: GSPO takes r of the whole
sequence, CISPO is -clip(r) A logp with clip(r) a constant, ``disable_ppo_ratio`` is -A logp. The row's coefficient
(weight of the pruning, sequence mean) multiplies the whole term, outside the clip: the estimator is then unbiased for
any term. Division by the denominator is the caller's.

Source: Shao et al., "DeepSeekMath" (arXiv 2402.03300), eq. 3 and 4; Yu et al., "DAPO" (arXiv 2503.14476), eq. 10;
Ye et al., "Mastering Complex Control in MOBA Games" (arXiv 1912.09729), eq. 5 (dual clip); Zheng et al., "GSPO"
(arXiv 2507.18071), eq. 5 and 7; MiniMax, "MiniMax-M1" (arXiv 2506.13585), eq. 4 and 5 (CISPO); Schulman,
"Approximating KL Divergence" (k1, k2, k3).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dppo_megatron.batches import FloatArray, LossSums, PackedRow
from dppo_megatron.config.schema import LossConfig
from dppo_megatron.rl.importance_weights import ImportanceWeights, importance_weights

SequenceSums = Callable[[Tensor, PackedRow], Tensor]
"""Sums over the sequences of a row: values [k, T] -> for every token the sum over its sequence's tokens, [k, T],
those on other context-parallel ranks included; differentiable."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The clipped surrogate with its KL penalty, summed over the tokens of a row.

    sequence_sums: needed by ``sequence_level_importance_ratios`` and by ``seq-mask-tis`` alone.
    """

    config: LossConfig
    sequence_sums: SequenceSums | None = None

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Means over the trained tokens; ``sampler_mismatch`` is exp(|trainer logp - sampler logp|) - 1."""
        return (
            "ratio",
            "ratio_clamped",
            "clipped",
            "kl_penalty",
            "surprisal",
            "sampler_mismatch",
            "sampler_mismatch_kl",
            "importance_ratio",
            "importance_out_of_bounds",
        )

    def has_gradient(self, advantages: FloatArray) -> bool:
        """Whether sequences of these advantages move the policy: one is not zero, or KL is penalised."""
        return bool(advantages.any()) or bool(len(advantages) and self.config.reference_policy_kl_penalty)

    def __call__(self, logprobs: Tensor, row: PackedRow) -> LossSums:
        """Sum the weighted token terms.

        logprobs: float32 [T], of the labels, under the policy being trained, at the sampling temperature.
        Without ``row.old_logprobs`` the policy is on-policy: the ratio is 1 and its gradient that of logp.
        """
        config = self.config
        trained = row.coefficients != 0
        old = logprobs.detach() if row.old_logprobs is None else row.old_logprobs
        # Where nothing is trained differences are set to zero: padding could overflow exp and poison the sum.
        log_ratio = torch.where(trained, logprobs - old, 0.0)
        drift = torch.where(trained, old - row.sampled_logprobs, 0.0)
        total_drift = mean_drift = None
        if config.sequence_level_importance_ratios or config.truncated_importance_sampling_type == "seq-mask-tis":
            assert self.sequence_sums is not None, "ratios of whole sequences need sums over sequences"
            sums = self.sequence_sums(torch.stack([trained.to(drift), drift, log_ratio]), row)
            num_tokens = sums[0].detach().clamp(min=1)
            total_drift, mean_drift = sums[1].detach(), sums[1].detach() / num_tokens
            if config.sequence_level_importance_ratios:
                log_ratio = torch.where(trained, sums[2] / num_tokens, 0.0)
        ratio = log_ratio.exp()
        clamped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
        sampler = importance_weights(drift, config=config, total=total_drift, mean=mean_drift)
        terms = _surrogate(torch.where(trained, logprobs, 0.0), row.advantages, ratio, clamped, config=config)
        if config.use_importance_sampling_correction:
            terms = terms * sampler.weights
        penalty = _penalty(logprobs, row, trained, config=config)
        terms = terms + config.reference_policy_kl_penalty * penalty
        metrics = _metrics(logprobs, trained, ratio, clamped, penalty, drift, sampler)
        return LossSums((terms * row.coefficients).sum(), metrics)


def _surrogate(logprobs: Tensor, advantages: Tensor, ratio: Tensor, clamped: Tensor, *, config: LossConfig) -> Tensor:
    if config.disable_ppo_ratio:
        return -advantages * logprobs
    if config.use_cispo:
        return -advantages * clamped.detach() * logprobs
    terms = -torch.minimum(ratio * advantages, clamped * advantages)
    if config.ratio_clip_c is None:
        return terms
    return torch.where(advantages < 0, terms.clamp(max=-config.ratio_clip_c * advantages), terms)


def _penalty(logprobs: Tensor, row: PackedRow, trained: Tensor, *, config: LossConfig) -> Tensor:
    """The divergence from the reference a token, before its coefficient; zero without one."""
    if not config.reference_policy_kl_penalty:
        return torch.zeros_like(logprobs)
    assert row.reference_logprobs is not None, "a KL penalty needs the reference policy's log-probs"
    penalty = kl_divergence(torch.where(trained, logprobs - row.reference_logprobs, 0.0), config=config)
    if not config.use_on_policy_kl_approximation:
        return penalty
    # The sampler is not the policy: weighted, the mean over its samples is the divergence under the policy.
    weights = torch.where(trained, logprobs.detach() - row.sampled_logprobs, 0.0).exp()
    return weights.nan_to_num(nan=0.0, posinf=0.0) * penalty


@torch.no_grad()
def _metrics(
    logprobs: Tensor,
    trained: Tensor,
    ratio: Tensor,
    clamped: Tensor,
    penalty: Tensor,
    drift: Tensor,
    sampler: ImportanceWeights,
) -> Tensor:
    """Sums over the trained tokens: their count, then ``PolicyLoss.metric_names``."""
    per_token = torch.stack(
        [
            torch.ones_like(ratio),
            ratio,
            clamped,
            (clamped != ratio).to(ratio),
            penalty,
            -logprobs,
            drift.abs().expm1(),
            drift.expm1() - drift,
            sampler.weights,
            sampler.out_of_bounds.to(ratio),
        ]
    )
    return (per_token * trained).sum(1)


def kl_divergence(log_ratio: Tensor, *, config: LossConfig) -> Tensor:
    """Estimate KL(policy || reference) a token from log_ratio = logp - reference logp, with NeMo-RL's clamps."""
    if config.kl_input_clamp_value is not None:
        log_ratio = log_ratio.clamp(-config.kl_input_clamp_value, config.kl_input_clamp_value)
    if config.reference_policy_kl_type == "k1":
        kl = log_ratio
    elif config.reference_policy_kl_type == "k2":
        kl = log_ratio.square() / 2
    else:
        kl = (-log_ratio).exp() - 1 + log_ratio
    if config.kl_output_clamp_value is not None:
        kl = kl.clamp(-config.kl_output_clamp_value, config.kl_output_clamp_value)
    return kl
