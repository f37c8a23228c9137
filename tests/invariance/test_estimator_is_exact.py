"""The expectation of the pruned gradient, over every outcome of the draws, is the full-batch gradient."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from toy_policy import MAX_NEW_TOKENS, ChosenDraws, ToyPolicy, candidates, scored

from dppo_megatron.batches import FloatArray, PromptBatch, Purpose, ScoredBatch
from dppo_megatron.config.schema import (
    CompletionPruningConfig,
    DppoConfig,
    GresoConfig,
    GrpoConfig,
    LossConfig,
    PromptPruningConfig,
)
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.pruning import (
    Pruning,
    completion_keep_probabilities,
    prompt_keep_probabilities,
    prune_completions,
    prune_prompts,
)

SEQUENCE_MEAN = LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=False)
TOKEN_MEAN = replace(SEQUENCE_MEAN, token_level_loss=True)
CORRECTED = replace(TOKEN_MEAN, use_importance_sampling_correction=True, truncated_importance_sampling_ratio=1.2)
LOSSES = {
    "clip": SEQUENCE_MEAN,
    "asymmetric clip, token mean": replace(TOKEN_MEAN, ratio_clip_min=0.1, ratio_clip_max=0.3),
    "dual clip": replace(TOKEN_MEAN, ratio_clip_c=1.1),
    "kl": replace(SEQUENCE_MEAN, reference_policy_kl_penalty=0.1, kl_output_clamp_value=0.2),
    "kl on policy": replace(TOKEN_MEAN, reference_policy_kl_penalty=0.1, use_on_policy_kl_approximation=True),
    "gspo": replace(SEQUENCE_MEAN, sequence_level_importance_ratios=True, ratio_clip_min=0.05, ratio_clip_max=0.05),
    "cispo": replace(TOKEN_MEAN, use_cispo=True),
    "reinforce": replace(TOKEN_MEAN, disable_ppo_ratio=True),
    "tis": replace(CORRECTED, truncated_importance_sampling_type="tis"),
    "icepop": replace(
        CORRECTED, truncated_importance_sampling_type="icepop", truncated_importance_sampling_ratio_min=0.8
    ),
    "seq-mask-tis": replace(
        CORRECTED, truncated_importance_sampling_type="seq-mask-tis", truncated_importance_sampling_ratio_min=0.9
    ),
}
EXACT = ("threshold", "neyman", "uniform")
LEVELS = {
    **{f"prompts {policy}": (policy, None) for policy in EXACT},
    **{f"completions {policy}": (None, policy) for policy in (*EXACT, "threshold of the group")},
    **{f"both {policy}": (policy, policy) for policy in EXACT},
    **{f"both {policy}, by surprise": (policy, f"{policy} by surprise") for policy in ("threshold", "neyman")},
}
PROMPT_IDS = (10, 20)
TOY = ToyPolicy()


def history_of(section: PromptPruningConfig) -> PromptHistory:
    """Both prompts were seen: one gave less signal than the mean, one more; the one all right, for greso."""
    history = PromptHistory(ema_decay=0.9, greso=section.greso if section.policy == "greso" else None)
    zero = replace(scored(candidates(PROMPT_IDS[:1])), advantages=np.zeros(3), rewards=np.ones(3))
    history.record(scored(candidates(PROMPT_IDS)))
    history.record(zero)
    return history


def pruning_of(prompts: str | None, completions: str | None, loss_fn: LossConfig, **dppo: object) -> Pruning:
    scope = "group" if completions == "threshold of the group" else "batch"
    policy, _, by_surprise = (completions or "threshold").removesuffix(" of the group").partition(" by ")
    config = DppoConfig(
        denominator="constant" if loss_fn.token_level_loss else "candidates",
        prompt_pruning=PromptPruningConfig(
            enabled=prompts is not None,
            policy=prompts or "threshold",  # pyright: ignore[reportArgumentType]
            rate=0.5,
            greso=GresoConfig(initial_exploration=0.4),
        ),
        completion_pruning=CompletionPruningConfig(
            enabled=completions is not None,
            policy=policy,  # pyright: ignore[reportArgumentType]
            score="surprise" if by_surprise else "advantage",
            rate=0.45,
            scope=scope,
        ),
    )
    config = replace(config, **dppo)  # pyright: ignore[reportArgumentType]
    return Pruning.from_config(config, loss_fn=loss_fn, grpo=GrpoConfig(), max_new_tokens=MAX_NEW_TOKENS)


def gradient(scores: ScoredBatch, *, pruning: Pruning, loss_fn: LossConfig, draws: Draws) -> FloatArray:
    """The gradient of what is kept, by the trainer's own plan and loss."""
    (plan,) = prune_completions(scores, pruning=pruning, draws=draws)
    ids = scores.prompts.prompt_ids[scores.prompt_rows[plan.sequences]].tolist()
    return TOY.gradient(
        list(zip(ids, scores.completion_indices[plan.sequences].tolist(), strict=True)),
        advantages=plan.advantages,
        weights=plan.weights,
        denominator=plan.denominator,
        loss_fn=loss_fn,
        token_level=loss_fn.token_level_loss,
    )


def subsets(names: list[tuple[int, ...]], probabilities: FloatArray) -> Iterator[tuple[float, ChosenDraws]]:
    """Every outcome of independent draws with its probability."""
    for choice in itertools.product((False, True), repeat=len(names)):
        chance = float(np.prod(np.where(choice, probabilities, 1 - probabilities)))
        if chance > 0:
            yield (
                chance,
                ChosenDraws(0, 0, keep=frozenset(name for name, kept in zip(names, choice, strict=True) if kept)),
            )


def starts(keys: np.ndarray, probabilities: FloatArray) -> Iterator[tuple[float, float]]:
    """A start in every interval in which the systematic draw keeps the same items, with the interval's length."""
    ends = np.cumsum(probabilities[np.argsort(keys, kind="stable")]) % 1.0
    bounds = np.unique(np.concatenate([[0.0, 1.0], ends]))
    for low, high in itertools.pairwise(bounds.tolist()):
        yield high - low, (low + high) / 2


def expected_gradient(
    batch: PromptBatch, *, history: PromptHistory, pruning: Pruning, loss_fn: LossConfig
) -> FloatArray:
    """Sum over all outcomes of both levels of probability times gradient."""
    draws = Draws(0, 0)
    p_prompts = prompt_keep_probabilities(batch, history=history, pruning=pruning, draws=draws)
    total, certainty = np.zeros_like(TOY.weight.detach().numpy().ravel()), 0.0
    if pruning.sampler == "systematic":
        keys = draws.words(Purpose.PROMPT_PRUNING, batch.minibatches, batch.prompt_ids, batch.occurrences)
        outer = [(chance, ChosenDraws(0, 0, starts=(start, 0.0))) for chance, start in starts(keys, p_prompts)]
    else:
        outer = list(subsets([(q,) for q in batch.prompt_ids.tolist()], p_prompts))
    for p_outer, draw in outer:
        scores = scored(prune_prompts(batch, history=history, pruning=pruning, draws=draw))
        p_items = completion_keep_probabilities(scores, pruning=pruning, draws=draws)
        names = [(int(q), o) for q in scores.prompts.prompt_ids for o in range(3)]
        if draw.starts is not None:
            rows = scores.prompt_rows
            keys = draws.words(
                Purpose.COMPLETION_PRUNING,
                scores.prompts.minibatches[rows],
                scores.prompts.prompt_ids[rows],
                scores.prompts.occurrences[rows],
                scores.completion_indices,
            )
            inner = [(p, replace(draw, starts=(draw.starts[0], start))) for p, start in starts(keys, p_items)]
        else:
            inner = list(subsets(names, p_items))
        for p_inner, draw_inner in inner:
            total += p_outer * p_inner * gradient(scores, pruning=pruning, loss_fn=loss_fn, draws=draw_inner)
            certainty += p_outer * p_inner
    assert certainty == pytest.approx(1, rel=1e-10)
    return total


def relative_bias(levels: tuple[str | None, str | None], loss_fn: LossConfig, **dppo: object) -> float:
    pruning = pruning_of(levels[0], levels[1], loss_fn, **dppo)
    batch, section = candidates(PROMPT_IDS), pruning.prompts or PromptPruningConfig()
    full = gradient(scored(batch), pruning=pruning.without_pruning(), loss_fn=loss_fn, draws=Draws(0, 0))
    expected = expected_gradient(batch, history=history_of(section), pruning=pruning, loss_fn=loss_fn)
    return float(np.linalg.norm(expected - full) / np.linalg.norm(full))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
def test_over_all_keep_patterns_the_expected_gradient_is_the_full_one(level: str, loss: str) -> None:
    # The full gradient drops nothing: that zero advantages may be dropped is part of the claim.
    assert relative_bias(LEVELS[level], LOSSES[loss], sampler="bernoulli") < 1e-10


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", LEVELS)
def test_over_all_starts_of_the_systematic_draw_the_expected_gradient_is_the_full_one(level: str, loss: str) -> None:
    assert relative_bias(LEVELS[level], LOSSES[loss], sampler="systematic") < 1e-10


@pytest.mark.parametrize("loss", ["clip", "kl", "gspo"])
@pytest.mark.parametrize("levels", [(None, "top"), ("top", None), ("greso", None)])
def test_top_and_greso_show_their_bias(levels: tuple[str | None, str | None], loss: str) -> None:
    assert relative_bias(levels, LOSSES[loss], sampler="bernoulli") > 0.05


@pytest.mark.parametrize("loss", ["clip", "dual clip", "kl"])
def test_dividing_by_what_was_kept_shows_its_bias(loss: str) -> None:
    assert relative_bias(("uniform", "uniform"), LOSSES[loss], sampler="bernoulli", denominator="kept") > 0.05


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_of_the_proof_has_clips_or_bounds_at_work(loss: str) -> None:
    """Each variant's gradient differs from the plain one's: none of them is the same test twice."""
    full = Pruning.from_config(DppoConfig(enabled=False), loss_fn=LOSSES[loss], grpo=GrpoConfig(), max_new_tokens=3)
    plain = replace(LossConfig(reference_policy_kl_penalty=0.0), token_level_loss=LOSSES[loss].token_level_loss)
    plain = replace(plain, ratio_clip_min=0.999, ratio_clip_max=1e9)
    scores = scored(candidates(PROMPT_IDS))
    ours, theirs = (gradient(scores, pruning=full, loss_fn=one, draws=Draws(0, 0)) for one in (LOSSES[loss], plain))
    assert np.linalg.norm(ours - theirs) > 0.01 * np.linalg.norm(theirs)
