"""The policy loss: one pure function of a row's tensors, returning sums.

The term of a sampled token with ratio r = exp(logp - old logp) and advantage A is

    -min(r A, clip(r, 1 - low, 1 + high) A)      and, for A < 0, no larger than -c A (dual clip)

plus the KL penalty. The row's coefficient (importance weight of the pruning, sequence mean) multiplies the whole
term, outside the clip: the estimator is then unbiased for any term. Division by the denominator is the caller's.

Source: Shao et al., "DeepSeekMath" (arXiv 2402.03300), eq. 3 and 4; Yu et al., "DAPO" (arXiv 2503.14476), eq. 10;
Ye et al., "Mastering Complex Control in MOBA Games" (arXiv 1912.09729), eq. 5 (dual clip); Schulman,
"Approximating KL Divergence" (k1, k2, k3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dppo_megatron.batches import LossSums, PackedRow
from dppo_megatron.config.schema import LossConfig


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The clipped surrogate with its KL penalty, summed over the tokens of a row."""

    config: LossConfig

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Means over the trained tokens; ``sampler_mismatch`` is exp(|trainer logp - sampler logp|) - 1."""
        return ("ratio", "clipped", "kl_penalty", "surprisal", "sampler_mismatch", "sampler_mismatch_kl")

    def __call__(self, logprobs: Tensor, row: PackedRow) -> LossSums:
        """Sum the weighted token terms.

        logprobs: float32 [T], of the labels, under the policy being trained, at the sampling temperature.
        Without ``row.old_logprobs`` the policy is on-policy: the ratio is 1 and its gradient that of logp.
        """
        return _sums(logprobs, row, config=self.config)


def _sums(logprobs: Tensor, row: PackedRow, *, config: LossConfig) -> LossSums:
    trained = row.coefficients != 0
    old = logprobs.detach() if row.old_logprobs is None else row.old_logprobs
    # Where nothing is trained the difference is set to zero: padding could overflow exp and poison the sum.
    log_ratio = torch.where(trained, logprobs - old, 0.0)
    ratio = log_ratio.exp()
    surrogate = ratio * row.advantages
    clipped_ratio = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    terms = -torch.minimum(surrogate, clipped_ratio * row.advantages)
    if config.ratio_clip_c is not None:
        terms = torch.where(row.advantages < 0, terms.clamp(max=-config.ratio_clip_c * row.advantages), terms)
    penalty = torch.zeros_like(terms)
    if config.reference_policy_kl_penalty:
        assert row.reference_logprobs is not None, "a KL penalty needs the reference policy's log-probs"
        penalty = kl_divergence(torch.where(trained, logprobs - row.reference_logprobs, 0.0), config=config)
    terms = terms + config.reference_policy_kl_penalty * penalty
    with torch.no_grad():
        drift = torch.where(trained, old - row.sampled_logprobs, 0.0)
        per_token = torch.stack(
            [
                torch.ones_like(ratio),
                ratio,
                (clipped_ratio != ratio).float(),
                penalty,
                -logprobs,
                drift.abs().expm1(),
                drift.expm1() - drift,
            ]
        )
        metrics = (per_token * trained).sum(1)
    return LossSums((terms * row.coefficients).sum(), metrics)


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
