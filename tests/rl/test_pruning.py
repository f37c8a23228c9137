"""Pruning of prompts and completions: unbiased, bounded, and the same wherever it is computed."""

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from dppo_megatron.batches import (
    FinishReason,
    FloatArray,
    IntArray,
    PromptBatch,
    Purpose,
    Ragged,
    RolloutBatch,
    ScoredBatch,
)
from dppo_megatron.config.schema import (
    CompletionPruningConfig,
    DppoConfig,
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

G = 4
NO_KL = LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=False)
WITH_KL = replace(NO_KL, reference_policy_kl_penalty=0.01)
TOKEN_MEAN = replace(NO_KL, token_level_loss=True)


def candidates(prompt_ids: ArrayLike, *, num_minibatches: int = 1) -> PromptBatch:
    ids = np.asarray(prompt_ids, np.int64)
    count = len(ids)
    minibatches = np.arange(count) * num_minibatches // count
    return PromptBatch(
        prompt_ids=ids,
        occurrences=np.array([(ids[:i] == ids[i]).sum() for i in range(count)], np.int64),
        minibatches=minibatches,
        tokens=Ragged.from_rows([[1] * (2 + i % 3) for i in range(count)]),
        texts=("",) * count,
        answers=("",) * count,
        weights=np.ones(count),
        num_candidates=np.bincount(minibatches, minlength=num_minibatches),
    )


def scored(prompts: PromptBatch, advantages: ArrayLike) -> ScoredBatch:
    flat = np.asarray(advantages, np.float64).ravel()
    return ScoredBatch(
        prompts=prompts,
        num_generations=len(flat) // max(len(prompts), 1) or G,
        rewards=np.zeros(len(flat)),
        advantages=flat,
        completion_lengths=np.arange(1, len(flat) + 1),
        finish_reasons=np.full(len(flat), FinishReason.STOP, np.int64),
        surprises=1 + np.arange(len(flat)) % 7 / 3,
    )


def pruning_of(dppo: DppoConfig, loss_fn: LossConfig = NO_KL, grpo: GrpoConfig | None = None) -> Pruning:
    return Pruning.from_config(dppo, loss_fn=loss_fn, grpo=grpo or GrpoConfig(), max_new_tokens=100)


def completions_only(**section: object) -> DppoConfig:
    config = replace(CompletionPruningConfig(), **section)  # pyright: ignore[reportArgumentType]
    return DppoConfig(prompt_pruning=PromptPruningConfig(enabled=False), completion_pruning=config)


def history_of(sizes: dict[int, float]) -> PromptHistory:
    history = PromptHistory(ema_decay=0.9)
    history.record(scored(candidates(list(sizes)), [[size, -size] for size in sizes.values()]))
    return history


def completion_probabilities(scores: ScoredBatch, pruning: Pruning) -> FloatArray:
    return completion_keep_probabilities(scores, pruning=pruning, draws=Draws(0, 0))


# Unbiasedness


@dataclass(frozen=True)
class ChosenDraws(Draws):
    """Bernoulli draws with given outcomes: keep the items whose (level, prompt id, completion) is listed."""

    keep: frozenset[tuple[int, ...]] = field(default_factory=frozenset)

    def words(self, purpose: Purpose, *parts: ArrayLike) -> NDArray[np.uint64]:
        _, ids, _, *completion = np.broadcast_arrays(*parts)
        items = zip(ids.tolist(), *(part.tolist() for part in completion), strict=True)
        kept = [(int(purpose), *item) in self.keep for item in items]
        return np.where(kept, np.uint64(0), np.uint64(2**64 - 1))


def subsets(items: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    return [c for k in range(len(items) + 1) for c in itertools.combinations(items, k)]


@pytest.mark.parametrize("prompt_policy", ["threshold", "neyman", "uniform"])
@pytest.mark.parametrize("completion_policy", ["threshold", "neyman", "uniform"])
@pytest.mark.parametrize("loss_fn", [NO_KL, WITH_KL])
def test_two_levels_of_pruning_leave_the_expected_sum_unchanged(prompt_policy, completion_policy, loss_fn) -> None:
    """Every outcome of the independent draws, with its probability, against the sum over all sequences."""
    advantages = {10: [0.3, -0.3, 0.0], 20: [1.0, -2.0, 1.0], 30: [0.0, 0.0, 0.0]}
    # Any terms will do, so long as they vanish with the advantage where there is no KL.
    terms = {
        (q, o): np.sin(q + o) + 2 * a if loss_fn is WITH_KL or a else 0.0
        for q, row in advantages.items()
        for o, a in enumerate(row)
    }
    dppo = DppoConfig(
        sampler="bernoulli",
        prompt_pruning=PromptPruningConfig(policy=prompt_policy, rate=0.5, min_keep_probability=0.2),
        completion_pruning=CompletionPruningConfig(policy=completion_policy, rate=0.5),
    )
    pruning = pruning_of(dppo, loss_fn)
    batch, history = candidates(list(advantages)), history_of({10: 0.2, 20: 1.3, 30: 0.0})
    p_prompts = dict(
        zip(
            advantages,
            prompt_keep_probabilities(batch, history=history, pruning=pruning, draws=Draws(0, 0)),
            strict=True,
        )
    )
    assert min(p_prompts.values()) < 1
    total, certainty = 0.0, 0.0
    for kept_prompts in subsets([(int(Purpose.PROMPT_PRUNING), q) for q in advantages]):
        ids = {q for _, q in kept_prompts}
        p_outer = np.prod([p if q in ids else 1 - p for q, p in p_prompts.items()])
        if p_outer == 0:
            continue
        kept = prune_prompts(
            batch, history=history, pruning=pruning, draws=ChosenDraws(0, 0, frozenset(kept_prompts))
        )
        scores = scored(kept, [advantages[q] for q in kept.prompt_ids.tolist()])
        p_items = completion_probabilities(scores, pruning)
        names = [(int(Purpose.COMPLETION_PRUNING), int(q), o) for q in kept.prompt_ids for o in range(3)]
        chance = {name: p for name, p in zip(names, p_items.tolist(), strict=True) if 0 < p < 1}
        for chosen in subsets(list(chance)):
            p_inner = np.prod([p if name in chosen else 1 - p for name, p in chance.items()])
            (plan,) = prune_completions(scores, pruning=pruning, draws=ChosenDraws(0, 0, frozenset(chosen)))
            estimate = sum(
                weight * terms[names[n][1:]]
                for n, weight in zip(plan.sequences.tolist(), plan.weights.tolist(), strict=True)
            )
            total += p_outer * p_inner * estimate / plan.denominator
            certainty += p_outer * p_inner
    assert certainty == pytest.approx(1, rel=1e-10)
    assert total == pytest.approx(sum(terms.values()) / 9, rel=1e-10)


@pytest.mark.parametrize("sampler", ["systematic", "bernoulli"])
def test_every_completion_is_kept_as_often_as_its_probability_says(sampler: str) -> None:
    rng = np.random.default_rng(3)
    scores = scored(candidates(np.arange(8), num_minibatches=2), rng.standard_normal((8, G)))
    pruning = replace(pruning_of(completions_only(policy="neyman")), sampler=sampler)
    expected = completion_probabilities(scores, pruning)
    counts = np.zeros(len(scores))
    for step in range(2000):
        for plan in prune_completions(scores, pruning=pruning, draws=Draws(1, step)):
            counts[plan.sequences] += 1
    deviations = (counts / 2000 - expected) / np.sqrt(np.maximum(expected * (1 - expected), 1e-12) / 2000)
    assert np.abs(deviations).max() < 4
    assert (deviations**2).mean() < 2


def test_each_minibatch_is_drawn_independently_of_the_parameters_an_earlier_one_moved() -> None:
    """Two samples, two optimizer steps: 1.0, then 2.0 + 0.3 theta. True E[theta] = 3.3; a joint draw: 3.0."""
    pruning = pruning_of(completions_only(policy="uniform", rate=0.5))
    scores = scored(candidates([1, 2], num_minibatches=2), [[1.0], [1.0]])
    thetas = []
    for step in range(8000):
        first, second = prune_completions(scores, pruning=pruning, draws=Draws(0, step))
        theta = float(first.weights.sum()) * 1.0
        thetas.append(theta + float(second.weights.sum()) * (2.0 + 0.3 * theta))
    error = float(np.std(thetas)) / len(thetas) ** 0.5
    assert error < 0.05
    assert np.mean(thetas) == pytest.approx(3.3, abs=3 * error)


def test_prompts_of_each_minibatch_are_drawn_independently() -> None:
    dppo = DppoConfig(prompt_pruning=PromptPruningConfig(policy="uniform", rate=0.5))
    pruning, history = pruning_of(dppo), history_of({1: 1.0, 2: 1.0})
    batch = candidates([1, 2], num_minibatches=2)
    numbers = [
        len(prune_prompts(batch, history=history, pruning=pruning, draws=Draws(0, step))) for step in range(400)
    ]
    # One joint systematic draw of two halves keeps one prompt, always.
    np.testing.assert_allclose(np.bincount(numbers, minlength=3) / 400, [0.25, 0.5, 0.25], atol=0.08)


# Keep probabilities


def test_the_four_numbers_of_theorem_4_1_follow_from_the_probabilities() -> None:
    scores = scored(candidates(np.arange(10)), np.tile([1.0, -1.0, 2.0, -2.0], (10, 1)))
    for rate, per_kept, per_candidate in ((0.7, 1.41, 2.17), (0.9, 3.03, 5.50)):
        p = completion_probabilities(scores, pruning_of(completions_only(policy="threshold", rate=rate)))
        assert (1 / p).mean() == pytest.approx(per_candidate, abs=0.0051)
        assert p.mean() * (1 / p).mean() == pytest.approx(per_kept, abs=0.0051)


@pytest.mark.parametrize(("scope", "expected"), [("batch", [0.5, 0.5, 1, 1]), ("group", [0.5, 1, 0.5, 1])])
def test_threshold_takes_the_mean_over_terms_that_are_not_identically_zero(scope, expected) -> None:
    scores = scored(candidates([1, 2, 3]), [[0, 0], [1.0, -2.0], [3.0, -6.0]])
    p = completion_probabilities(scores, pruning_of(completions_only(policy="threshold", rate=0.5, scope=scope)))
    np.testing.assert_array_equal(p, [0, 0, *expected])


def test_neyman_scores_a_completion_by_its_advantage_times_its_prompts_weight() -> None:
    prompts = candidates([1, 2]).with_weights(np.array([1.0, 2.0]))
    scores = scored(prompts, [[0.2, -0.2], [0.1, -0.3]])
    p = completion_probabilities(scores, pruning_of(completions_only(policy="neyman", rate=0.5)))
    np.testing.assert_allclose(p, np.array([0.2, 0.2, 0.2, 0.6]) / 1.2 * 2, rtol=1e-9)


@pytest.mark.parametrize(("loss_fn", "divisors"), [(NO_KL, [1, 2, 3, 4]), (TOKEN_MEAN, [1, 1, 1, 1])])
def test_surprise_scores_a_completion_by_what_its_tokens_add_to_the_loss(loss_fn, divisors) -> None:
    prompts = candidates([1, 2]).with_weights(np.array([1.0, 2.0]))
    scores = replace(scored(prompts, [[1.0, -2.0], [0.5, -1.0]]), surprises=np.array([0.8, 0.5, 0.6, 0.9]))
    config = completions_only(policy="neyman", score="surprise", rate=0.6)
    p = completion_probabilities(scores, pruning_of(config, loss_fn))
    sizes = np.array([0.8, 1.0, 0.3, 0.9]) * [1, 1, 2, 2] / divisors
    np.testing.assert_allclose(p, sizes / sizes.sum() * 1.6, rtol=1e-9)


def test_surprise_is_the_root_of_the_squared_probabilities_of_other_tokens() -> None:
    rng = np.random.default_rng(2)
    chances = rng.random(9).astype(np.float32)
    rows = [chances[:4], chances[4:5], chances[5:]]
    rollouts = RolloutBatch(
        prompts=candidates([1]),
        completions=Ragged.from_rows([np.ones(len(row), np.int64).tolist() for row in rows]),
        sampled_logprobs=np.log(chances),
        finish_reasons=np.zeros(3, np.int64),
        version=0,
    )
    expected = [np.sqrt(((1 - row.astype(np.float64)) ** 2).sum()) for row in rows]
    np.testing.assert_allclose(rollouts.surprises, expected, rtol=1e-5)


@pytest.mark.parametrize("enabled", [True, False])
def test_zero_advantages_are_dropped_with_certainty_only_without_a_kl_term(enabled: bool) -> None:
    scores = scored(candidates([1, 2]), [[0, 0, 0, 0], [1.0, -1.0, 2.0, -2.0]])
    dppo = replace(completions_only(policy="neyman"), enabled=enabled)
    assert (completion_probabilities(scores, pruning_of(dppo))[:4] == 0).all()
    least = 0.05 if enabled else 1
    for kept in (pruning_of(dppo, WITH_KL), pruning_of(replace(dppo, drop_zero_advantage=False))):
        assert not kept.drops_zero_advantage
        assert (completion_probabilities(scores, kept)[:4] >= least).all()


def test_the_log_is_told_why_zero_advantages_stay_and_what_is_biased() -> None:
    assert pruning_of(completions_only()).notes == ()
    assert "advantage 0" in pruning_of(completions_only(), WITH_KL).notes[0]
    assert "top is biased" in pruning_of(completions_only(policy="top")).notes[0]
    assert "kept is biased" in pruning_of(replace(completions_only(), denominator="kept")).notes[0]
    ratio = DppoConfig(denominator="estimated_tokens")
    assert "ratio estimator" in pruning_of(ratio, TOKEN_MEAN).notes[0]


@pytest.mark.parametrize("loss_fn", [NO_KL, WITH_KL])
def test_overlong_completions_are_dropped_but_stay_in_the_denominator(loss_fn: LossConfig) -> None:
    scores = replace(
        scored(candidates([1]), [[1.0, -1.0, 2.0, -2.0]]),
        finish_reasons=np.array([FinishReason.STOP, FinishReason.LENGTH] * 2, np.int64),
    )
    grpo = GrpoConfig(overlong_filtering=True)
    (plan,) = prune_completions(
        scores, pruning=pruning_of(DppoConfig(enabled=False), loss_fn, grpo), draws=Draws(0, 0)
    )
    np.testing.assert_array_equal(plan.sequences, [0, 2])
    assert plan.denominator == 4
    assert (completion_probabilities(scores, pruning_of(DppoConfig(enabled=False), loss_fn)) == 1).all()


def test_top_spreads_ties_over_the_minibatches() -> None:
    scores = scored(candidates(np.arange(20), num_minibatches=2), np.tile([1.0, -1.0], (20, 1)))
    plans = prune_completions(scores, pruning=pruning_of(completions_only(policy="top", rate=0.5)), draws=Draws(0, 0))
    assert sum(len(plan) for plan in plans) == 20
    assert min(len(plan) for plan in plans) > 3
    assert all((plan.weights == 1).all() for plan in plans)


@pytest.mark.parametrize(
    ("policy", "expected"),
    # The mean of the seen scores is 1 / 6; unseen ones counted as zero would lower it to 0.1.
    [("threshold", [0.5, 0.5, 1]), ("uniform", [0.5, 0.5, 0.5]), ("neyman", [0.2, 0.325, 0.975])],
)
def test_unseen_prompts_are_kept_and_do_not_enter_the_mean(policy, expected) -> None:
    p = prompt_keep_probabilities(
        candidates([1, 8, 2, 9, 3]),
        history=history_of({1: 0.0, 2: 0.125, 3: 0.375}),
        pruning=pruning_of(DppoConfig(prompt_pruning=PromptPruningConfig(policy=policy, rate=0.5))),
        draws=Draws(0, 0),
    )
    np.testing.assert_array_equal(p[[1, 3]], 1)
    np.testing.assert_allclose(p[[0, 2, 4]], expected, rtol=1e-9)


@pytest.mark.parametrize("score", ["advantage", "surprise"])
@pytest.mark.parametrize("policy", ["threshold", "neyman", "uniform"])
def test_weights_are_bounded_by_the_least_probabilities_and_never_clipped(policy: str, score: str) -> None:
    """Sizes over nine orders of magnitude: ``neyman`` reaches the bound, and each weight is 1 / (p_q p_o)."""
    sizes = 10.0 ** -np.arange(10)
    history, batch = history_of(dict(enumerate(sizes.tolist()))), candidates(np.arange(10))
    dppo = DppoConfig(
        prompt_pruning=PromptPruningConfig(rate=0.7, min_keep_probability=0.2),
        completion_pruning=CompletionPruningConfig(rate=0.8, min_keep_probability=0.1),
    )
    changes = {"prompt_pruning": {"policy": policy}, "completion_pruning": {"policy": policy, "score": score}}
    dppo = replace(dppo, **{name: replace(getattr(dppo, name), **values) for name, values in changes.items()})
    pruning, largest = pruning_of(dppo), 0.0
    for step in range(60):
        draws = Draws(0, step)
        p_prompts = prompt_keep_probabilities(batch, history=history, pruning=pruning, draws=draws)
        kept = prune_prompts(batch, history=history, pruning=pruning, draws=draws)
        scores = scored(kept, np.outer(sizes[kept.prompt_ids], [1, -1e-3, 1e-6, -1]))
        probabilities = completion_probabilities(scores, pruning)
        (plan,) = prune_completions(scores, pruning=pruning, draws=draws)
        p_both = p_prompts[kept.prompt_ids[scores.prompt_rows]] * probabilities
        np.testing.assert_allclose(plan.weights, 1 / p_both[plan.sequences], rtol=1e-12)
        largest = max(largest, plan.weights.max(initial=0.0))
    assert largest <= 1 / (0.2 * 0.1)
    assert largest > 0.99 / (0.2 * 0.1) or policy != "neyman"


# What comes out


def test_kept_prompts_stay_in_order_with_inverse_probabilities_as_weights() -> None:
    history = history_of({q: 0.1 * q for q in range(30)})
    batch = candidates(np.arange(40), num_minibatches=3)
    pruning = pruning_of(DppoConfig(prompt_pruning=PromptPruningConfig(rate=0.6)))
    p = prompt_keep_probabilities(batch, history=history, pruning=pruning, draws=Draws(0, 0))
    kept = prune_prompts(batch, history=history, pruning=pruning, draws=Draws(0, 0))
    assert 20 < len(kept) < 40
    assert (np.diff(kept.prompt_ids) > 0).all()
    np.testing.assert_array_equal(kept.weights, 1 / p[kept.prompt_ids])
    np.testing.assert_array_equal(kept.num_candidates, batch.num_candidates)
    for m in range(3):
        expected = p[batch.minibatches == m].sum()
        assert abs((kept.minibatches == m).sum() - expected) < 1


def test_a_plan_describes_its_sequences() -> None:
    rng = np.random.default_rng(5)
    prompts = candidates(np.arange(6), num_minibatches=2).with_weights(1 + rng.random(6))
    scores = scored(prompts, rng.standard_normal((6, G)))
    pruning = pruning_of(completions_only())
    probabilities = completion_probabilities(scores, pruning)
    plans = prune_completions(scores, pruning=pruning, draws=Draws(0, 0))
    for m, plan in enumerate(plans):
        assert plan.minibatch == m
        np.testing.assert_array_equal(plan.candidates, np.arange(12) + 12 * m)
        np.testing.assert_array_equal(plan.keep_probabilities, probabilities[plan.candidates])
        assert 0 < len(plan) < 12
        assert (np.diff(plan.sequences) > 0).all()
        assert set(plan.sequences) <= set(plan.candidates)
        for k, n in enumerate(plan.sequences):
            assert plan.weights[k] == pytest.approx(prompts.weights[n // G] / probabilities[n])
            assert plan.completion_lengths[k] == n + 1
            assert plan.lengths[k] == n + 1 + 2 + (n // G) % 3
            assert plan.advantages[k] == scores.advantages[n]


def test_without_dppo_everything_with_a_gradient_is_kept_with_weight_one() -> None:
    pruning = pruning_of(DppoConfig(enabled=False), TOKEN_MEAN)
    batch, history = candidates(np.arange(4), num_minibatches=2), history_of({q: float(q) for q in range(4)})
    kept = prune_prompts(batch, history=history, pruning=pruning, draws=Draws(0, 0))
    assert len(kept) == 4
    advantages = [[0, 0], [1, -1], [0.1, -0.1], [0, 2]]
    plans = prune_completions(scored(kept, advantages), pruning=pruning, draws=Draws(0, 0))
    np.testing.assert_array_equal(np.concatenate([plan.sequences for plan in plans]), [2, 3, 4, 5, 7])
    assert all((plan.weights == 1).all() for plan in plans)


@pytest.mark.parametrize("denominator", ["constant", "estimated_tokens", "kept"])
def test_a_minibatch_of_which_nothing_is_left_does_not_divide_by_zero(denominator) -> None:
    pruning = pruning_of(DppoConfig(denominator=denominator), TOKEN_MEAN)
    empty = scored(candidates(np.arange(4), num_minibatches=2).take(np.array([], np.int64)), [])
    plans = prune_completions(empty, pruning=pruning, draws=Draws(0, 0))
    assert [len(plan) for plan in plans] == [0, 0]
    assert all(plan.denominator >= 1 for plan in plans)


# Layouts and restarts


def reorder(scores: ScoredBatch, order: IntArray) -> tuple[ScoredBatch, IntArray]:
    """The same scored prompts in another order, and the old row of each new sequence."""
    rows = (order[:, None] * G + np.arange(G)).ravel()
    moved = scored(scores.prompts.take(order), scores.advantages[rows])
    return replace(moved, completion_lengths=scores.completion_lengths[rows], surprises=scores.surprises[rows]), rows


@pytest.mark.parametrize("policy", ["threshold", "neyman", "uniform", "top"])
@pytest.mark.parametrize("score", ["advantage", "surprise"])
@pytest.mark.parametrize("sampler", ["systematic", "bernoulli"])
def test_decisions_do_not_depend_on_the_order_in_which_scores_were_gathered(policy, score, sampler) -> None:
    rng = np.random.default_rng(7)
    prompts = candidates(rng.integers(0, 20, 30), num_minibatches=2).with_weights(1 + rng.random(30))
    scores = scored(prompts, rng.standard_normal((30, G)).round(1))
    dppo = replace(completions_only(policy=policy, score=score), sampler=sampler, denominator="estimated_tokens")
    pruning = pruning_of(dppo, TOKEN_MEAN)
    expected = prune_completions(scores, pruning=pruning, draws=Draws(0, 3))
    for _ in range(5):
        moved, rows = reorder(scores, rng.permutation(30))
        for plan, other in zip(expected, prune_completions(moved, pruning=pruning, draws=Draws(0, 3)), strict=True):
            old_rows = rows[other.sequences]
            np.testing.assert_array_equal(np.sort(old_rows), plan.sequences)
            np.testing.assert_array_equal(other.weights[np.argsort(old_rows)], plan.weights)
            assert other.denominator == plan.denominator


def test_a_restart_does_not_change_which_prompts_are_kept() -> None:
    rng = np.random.default_rng(8)
    pruning = pruning_of(DppoConfig())
    history = PromptHistory(ema_decay=0.9)
    for step in range(8):
        batch, draws = candidates(rng.integers(0, 30, 24), num_minibatches=2), Draws(0, step)
        restored = PromptHistory.from_state(history.state(), ema_decay=0.9)
        kept = prune_prompts(batch, history=history, pruning=pruning, draws=draws)
        again = prune_prompts(batch, history=restored, pruning=pruning, draws=replace(draws))
        assert len(kept) < 24 or step == 0
        np.testing.assert_array_equal(kept.prompt_ids, again.prompt_ids)
        np.testing.assert_array_equal(kept.weights, again.weights)
        history.record(scored(kept, rng.standard_normal((len(kept), G))))


# Set-up


@pytest.mark.parametrize("level", ["prompt_pruning", "completion_pruning"])
@pytest.mark.parametrize("wrong", [{"rate": -0.1}, {"rate": 0.9}, {"rate": 1.0}])
def test_a_rate_beyond_the_least_keep_probability_is_refused(level: str, wrong: dict[str, float]) -> None:
    section = replace(getattr(DppoConfig(), level), min_keep_probability=0.2)
    with pytest.raises(ValueError, match=rf"dppo\.{level}\.rate: {wrong['rate']}; allowed: 0 to"):
        pruning_of(replace(DppoConfig(), **{level: replace(section, **wrong)}))
    # 1 - 0.9 is a rounding below 0.1.
    pruning_of(replace(DppoConfig(), **{level: replace(section, rate=0.1, min_keep_probability=0.9)}))


@pytest.mark.parametrize(
    "wrong",
    [{"min_keep_probability": 0.0}, {"min_keep_probability": 1.5}, {"policy": "neyman", "scope": "group"}],
)
def test_bounds_and_scopes_that_would_do_harm_or_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"dppo\.completion_pruning\.{list(wrong)[-1]}: "):
        pruning_of(completions_only(**wrong))


def test_a_denominator_that_would_bias_the_objective_is_refused_at_set_up() -> None:
    with pytest.raises(ValueError, match=r"dppo\.denominator"):
        pruning_of(DppoConfig(), TOKEN_MEAN)
    assert pruning_of(completions_only(), TOKEN_MEAN).denominator == "tokens"
    assert pruning_of(DppoConfig(enabled=False), TOKEN_MEAN).denominator == "tokens"
