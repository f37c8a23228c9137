"""Trainer against sampler: what to tell a person when the two disagree on the sampled tokens."""

from dppo_megatron import metric_names
from dppo_megatron.run_records import StepRecord

_CAUSES = (
    "policy.megatron_cfg.bias_activation_fusion, an FP8 key-value cache or FP8 rollouts, "
    "an engine precision that is not policy.precision, and weights or a prefix cache of an earlier step"
)
_FP8_TRAINING = "FP8 training (policy.megatron_cfg.fp8_cfg), whose rounding the sampler does not share, "


class MismatchWatch:
    """Says once that the disagreement is past its limit, and again only after it was below."""

    def __init__(self, limit: float, *, fp8_training: bool) -> None:
        """``limit``: of ``dppo/sampler_mismatch``, the mean of exp(|log-prob difference|) - 1."""
        self._limit = limit
        self._causes = f"{_FP8_TRAINING if fp8_training else ''}{_CAUSES}"
        self._is_past = False

    def note(self, record: StepRecord) -> str | None:
        """What to tell of a step, if anything. With several updates a step, policy drift counts from the second."""
        value = record.metrics()[metric_names.SAMPLER_MISMATCH]
        was_past, self._is_past = self._is_past, value > self._limit
        if was_past or not self._is_past:
            return None
        return (
            f"warning: step {record.step + 1}: trainer and sampler disagree, {metric_names.SAMPLER_MISMATCH} = "
            f"{value:.3g} is above dppo.rollout.mismatch_warning = {self._limit:g}; usual causes: {self._causes}"
        )
