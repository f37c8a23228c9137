"""The loss against formulas written out by hand, one sequence and one token at a time, in float64."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dppo_megatron.batches import PackedRow
from dppo_megatron.config.schema import LossConfig
from dppo_megatron.rl.loss import PolicyLoss

PLAIN = LossConfig(reference_policy_kl_penalty=0.0)
LENGTHS, PADDING = (3, 1, 4), 2
ADVANTAGES, WEIGHTS = (1.5, -2.0, -0.5), (1.0, 2.5, 4.0)


@dataclass(frozen=True)
class Case:
    """A row of three sequences with padding behind it, and its tokens under four policies, float64 [3, T]."""

    row: PackedRow
    now: Tensor

    def tokens(self) -> list[list[dict[str, float]]]:
        """By sequence and token: log-probs (now, old, sampled, reference), advantage a, weight w."""
        result, start = [], 0
        for advantage, weight, length in zip(ADVANTAGES, WEIGHTS, LENGTHS, strict=True):
            result.append(
                [
                    {
                        "now": float(self.now[t]),
                        "old": float(self.row.old_logprobs[t]),  # pyright: ignore[reportOptionalSubscript]
                        "sampled": float(self.row.sampled_logprobs[t]),
                        "reference": float(self.row.reference_logprobs[t]),  # pyright: ignore[reportOptionalSubscript]
                        "a": advantage,
                        "w": weight,
                    }
                    for t in range(start, start + length)
                ]
            )
            start += length
        return result


def spread(values: tuple[float, ...]) -> np.ndarray:
    return np.concatenate([np.repeat(values, LENGTHS), np.zeros(PADDING)])


def as_tensor(values: np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_case(seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    size = sum(LENGTHS) + PADDING
    now = rng.normal(-1.5, 0.5, size)
    old, sampled, reference = (
        now + rng.normal(0, 0.5, size),
        now + rng.normal(0, 0.5, size),
        now + rng.normal(0, 1, size),
    )
    # What stands in the padding must not matter, however wild.
    for values in (now, old, sampled, reference):
        values[-PADDING:] = rng.normal(0, 500, PADDING)
    bounds = np.cumsum([0, *LENGTHS])
    bounds[-1] += PADDING
    row = PackedRow(
        token_ids=torch.zeros(size, dtype=torch.int64),
        labels=torch.zeros(size, dtype=torch.int64),
        positions=torch.zeros(size, dtype=torch.int64),
        coefficients=as_tensor(spread(WEIGHTS)),
        advantages=as_tensor(spread(ADVANTAGES)),
        sampled_logprobs=as_tensor(sampled),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        sequence_lengths=np.diff(bounds),
        num_sequences=len(LENGTHS),
        old_logprobs=as_tensor(old),
        reference_logprobs=as_tensor(reference),
    )
    return Case(row, as_tensor(now).requires_grad_())


def sequence_sums(values: Tensor, row: PackedRow) -> Tensor:
    bounds = row.cu_seqlens.tolist()
    parts = [values[:, a:b].sum(1, keepdim=True).expand(-1, b - a) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts, 1)


def value(case: Case, **changes: Any) -> float:
    return float(PolicyLoss(replace(PLAIN, **changes), sequence_sums)(case.now, case.row).loss.detach())


def by_hand(case: Case, term: Any) -> float:
    return sum(token["w"] * term(token) for tokens in case.tokens() for token in tokens)


def clipped(a: float, ratio: float, low: float = 0.2, high: float = 0.2) -> float:
    return -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)


def ratio_of(token: dict[str, float]) -> float:
    return math.exp(token["now"] - token["old"])


def test_the_asymmetric_clip_is_the_formula() -> None:
    case = make_case()
    expected = by_hand(case, lambda t: clipped(t["a"], ratio_of(t), 0.1, 0.3))
    assert value(case, ratio_clip_min=0.1, ratio_clip_max=0.3) == pytest.approx(expected, rel=1e-12)


def test_the_dual_clip_bounds_terms_of_negative_advantages_alone() -> None:
    case = make_case(3)

    def term(t: dict[str, float]) -> float:
        plain = clipped(t["a"], ratio_of(t))
        return min(plain, -1.05 * t["a"]) if t["a"] < 0 else plain

    assert value(case, ratio_clip_c=1.05) == pytest.approx(by_hand(case, term), rel=1e-12)
    assert by_hand(case, term) != pytest.approx(by_hand(case, lambda t: clipped(t["a"], ratio_of(t))))


def test_cispo_is_a_clipped_constant_times_the_logprob() -> None:
    case = make_case()

    def clip(t: dict[str, float]) -> float:
        return min(max(ratio_of(t), 0.8), 1.2)

    assert value(case, use_cispo=True) == pytest.approx(
        by_hand(case, lambda t: -t["a"] * clip(t) * t["now"]), rel=1e-12
    )
    loss = PolicyLoss(replace(PLAIN, use_cispo=True))(case.now, case.row).loss
    (gradient,) = torch.autograd.grad(loss, case.now)
    expected = [-t["w"] * t["a"] * clip(t) for tokens in case.tokens() for t in tokens]
    np.testing.assert_allclose(gradient.numpy(), [*expected, 0, 0], rtol=1e-12)


def test_without_the_ratio_the_term_is_that_of_reinforce() -> None:
    case = make_case()
    expected = by_hand(case, lambda t: -t["a"] * t["now"])
    assert value(case, disable_ppo_ratio=True) == pytest.approx(expected, rel=1e-12)


def test_gspo_takes_the_ratio_of_the_whole_sequence() -> None:
    case = make_case()
    expected, slopes = 0.0, []
    for tokens in case.tokens():
        ratio = math.exp(np.mean([t["now"] - t["old"] for t in tokens]))
        a, w = tokens[0]["a"], tokens[0]["w"]
        expected += w * len(tokens) * clipped(a, ratio, 0.05, 0.05)
        active = -ratio * a >= -min(max(ratio, 0.95), 1.05) * a
        # Every token moves the ratio of its sequence by 1 / length, and all tokens' terms with it.
        slopes += [-w * a * ratio if active else 0.0] * len(tokens)
    config = replace(PLAIN, sequence_level_importance_ratios=True, ratio_clip_min=0.05, ratio_clip_max=0.05)
    loss = PolicyLoss(config, sequence_sums)(case.now, case.row).loss
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(loss, case.now)
    np.testing.assert_allclose(gradient.numpy(), [*slopes, 0, 0], rtol=1e-12)
    assert 0 < np.count_nonzero(slopes) < len(slopes)


@pytest.mark.parametrize(
    ("kind", "estimate"),
    [("k1", lambda x: x), ("k2", lambda x: x * x / 2), ("k3", lambda x: math.exp(-x) - 1 + x)],
)
@pytest.mark.parametrize("on_policy", [False, True])
def test_the_kl_penalty_is_clamped_and_weighted_as_the_formula_says(
    kind: str, estimate: Any, on_policy: bool
) -> None:
    case = make_case(1)

    def term(t: dict[str, float]) -> float:
        kl = estimate(min(max(t["now"] - t["reference"], -1.2), 1.2))
        weight = math.exp(t["now"] - t["sampled"]) if on_policy else 1.0
        return clipped(t["a"], ratio_of(t)) + 0.3 * weight * min(max(kl, -0.7), 0.7)

    got = value(
        case,
        reference_policy_kl_penalty=0.3,
        reference_policy_kl_type=kind,
        kl_input_clamp_value=1.2,
        kl_output_clamp_value=0.7,
        use_on_policy_kl_approximation=on_policy,
    )
    assert got == pytest.approx(by_hand(case, term), rel=1e-12)


CORRECTION = {"use_importance_sampling_correction": True}


@pytest.mark.parametrize("kind", [None, "tis", "icepop", "seq-mask-tis"])
def test_the_sampler_correction_is_bounded_as_its_kind_says(kind: str | None) -> None:
    case, low, high = make_case(2), 0.8, 1.1
    expected = 0.0
    for tokens in case.tokens():
        mean = math.exp(np.mean([t["old"] - t["sampled"] for t in tokens]))
        for t in tokens:
            weight = math.exp(t["old"] - t["sampled"])
            if kind == "tis":
                weight = min(max(weight, low), high)
            elif kind == "icepop":
                weight *= low <= weight <= high
            elif kind == "seq-mask-tis":
                weight *= low <= mean <= high
            expected += t["w"] * weight * clipped(t["a"], ratio_of(t))
    bounds = {"truncated_importance_sampling_ratio": high, "truncated_importance_sampling_ratio_min": low}
    extra = {"truncated_importance_sampling_type": kind, **bounds} if kind else {}
    assert value(case, **CORRECTION, **extra) == pytest.approx(expected, rel=1e-12)


def test_under_gspo_the_sampler_correction_is_that_of_the_whole_sequence() -> None:
    case, expected = make_case(), 0.0
    for tokens in case.tokens():
        ratio = math.exp(np.mean([t["now"] - t["old"] for t in tokens]))
        weight = math.exp(sum(t["old"] - t["sampled"] for t in tokens))
        expected += tokens[0]["w"] * len(tokens) * weight * clipped(tokens[0]["a"], ratio)
    got = value(case, sequence_level_importance_ratios=True, **CORRECTION)
    assert got == pytest.approx(expected, rel=1e-12)


def test_the_correction_is_a_constant_and_leaves_the_kl_penalty_alone() -> None:
    case = make_case()
    kl = {"reference_policy_kl_penalty": 0.3}
    extra = value(case, **CORRECTION, **kl) - value(case, **CORRECTION)
    assert extra == pytest.approx(value(case, **kl) - value(case), rel=1e-9)
    row = replace(case.row, old_logprobs=None)  # on policy: the weight is made of the policy's own log-probs
    loss = PolicyLoss(replace(PLAIN, use_importance_sampling_correction=True))(case.now, row).loss
    (gradient,) = torch.autograd.grad(loss, case.now)
    expected = [-t["w"] * t["a"] * math.exp(t["now"] - t["sampled"]) for tokens in case.tokens() for t in tokens]
    np.testing.assert_allclose(gradient.numpy(), [*expected, 0, 0], rtol=1e-12)


def test_a_weight_that_is_not_finite_drops_its_token() -> None:
    case = make_case()
    sampled = case.row.sampled_logprobs.clone()
    sampled[0] = -2000.0
    row = replace(case.row, sampled_logprobs=sampled)
    config = replace(PLAIN, use_importance_sampling_correction=True)
    lost, kept = (PolicyLoss(config)(case.now, one).loss.item() for one in (row, case.row))
    first = case.tokens()[0][0]
    weight = math.exp(first["old"] - first["sampled"])
    assert kept - lost == pytest.approx(first["w"] * weight * clipped(first["a"], ratio_of(first)), rel=1e-9)


def test_metrics_are_sums_over_the_trained_tokens() -> None:
    case = make_case()
    config = replace(
        PLAIN,
        **CORRECTION,  # pyright: ignore[reportArgumentType]
        truncated_importance_sampling_type="tis",
        truncated_importance_sampling_ratio=1.1,
    )
    loss = PolicyLoss(config, sequence_sums)
    count, *sums = loss(case.now, case.row).metrics.tolist()
    got = dict(zip(loss.metric_names, sums, strict=True))
    tokens = [t for tokens in case.tokens() for t in tokens]
    weights = [math.exp(t["old"] - t["sampled"]) for t in tokens]
    assert count == len(tokens)
    assert got["ratio"] == pytest.approx(sum(map(ratio_of, tokens)))
    assert got["ratio_clamped"] == pytest.approx(sum(min(max(ratio_of(t), 0.8), 1.2) for t in tokens))
    assert got["clipped"] == sum(abs(ratio_of(t) - 1) > 0.2 for t in tokens)
    assert got["importance_ratio"] == pytest.approx(sum(min(weight, 1.1) for weight in weights))
    assert got["importance_out_of_bounds"] == sum(weight > 1.1 for weight in weights)
    assert got["surprisal"] == pytest.approx(-sum(t["now"] for t in tokens))
