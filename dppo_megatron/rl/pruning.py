"""Pruning of prompts before generation and of completions before the update, without bias.

Each item is kept with a known probability p, and its whole loss term is weighted by 1 / p, over a denominator
that does not depend on what was kept: E[sum over kept of term / p] = sum of all terms, for any terms.

Source: Horvitz and Thompson, J. Am. Stat. Assoc. 47 (1952); the two levels and ``threshold``: Zhu et al.,
arXiv 2603.04135. Departures: the denominator counts what was there before pruning, and keep decisions are
draws with exact probabilities (test_two_levels_of_pruning_leave_the_expected_sum_unchanged).
"""

from dataclasses import dataclass, replace
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from dppo_megatron.batches import FinishReason, FloatArray, IntArray, PromptBatch, PrunedBatch, Purpose, ScoredBatch
from dppo_megatron.config.schema import (
    CompletionPruningConfig,
    DppoConfig,
    GrpoConfig,
    LossConfig,
    PromptPruningConfig,
)
from dppo_megatron.rl import keep_probabilities, sampling_designs
from dppo_megatron.rl.denominators import DenominatorKind, denominator_kind, minibatch_denominator
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.prompt_history import PromptHistory

_BIASED = ("top", "greso")


@dataclass(frozen=True, slots=True)
class Pruning:
    """What is pruned, how, and what the sum of loss terms is divided by.

    prompts, completions: None keeps every item of that level that has a gradient.
    drops_zero_advantage: completions with advantage 0 are dropped with certainty, since nothing in their
    term has a gradient. filters_overlong: completions cut at the length limit have no loss.
    notes: what the log should say once about departures from an unbiased or asked-for estimator.
    """

    prompts: PromptPruningConfig | None
    completions: CompletionPruningConfig | None
    sampler: Literal["systematic", "bernoulli"]
    drops_zero_advantage: bool
    filters_overlong: bool
    denominator: DenominatorKind
    max_new_tokens: int
    notes: tuple[str, ...]

    @classmethod
    def from_config(
        cls, dppo: DppoConfig, *, loss_fn: LossConfig, grpo: GrpoConfig, max_new_tokens: int
    ) -> "Pruning":
        """The pruning that a configuration asks for; without ``dppo.enabled`` nothing is pruned by chance.

        Raises: ValueError for rates that the least keep probability forbids, and for denominators that
        contradict the objective or would bias it unnoticed.
        """
        prompts = dppo.prompt_pruning if dppo.enabled and dppo.prompt_pruning.enabled else None
        completions = dppo.completion_pruning if dppo.enabled and dppo.completion_pruning.enabled else None
        for name, section in (("prompt_pruning", prompts), ("completion_pruning", completions)):
            if section is not None and section.policy not in _BIASED:
                _check_rate(section, name=name)
        if completions is not None and completions.scope == "group" and completions.policy != "threshold":
            raise ValueError("dppo.completion_pruning.scope: group; allowed: batch, unless the policy is threshold")
        drops_zero_advantage = dppo.drop_zero_advantage and loss_fn.reference_policy_kl_penalty == 0
        notes = []
        if dppo.drop_zero_advantage and not drops_zero_advantage:
            notes.append(
                "completions with advantage 0 are not dropped: their KL term has a gradient "
                f"(loss_fn.reference_policy_kl_penalty: {loss_fn.reference_policy_kl_penalty})"
            )
        for name, section in (("prompt_pruning", prompts), ("completion_pruning", completions)):
            if section is not None and section.policy in _BIASED:
                notes.append(f"dppo.{name}.policy: {section.policy} is biased: for comparison only")
        if dppo.denominator == "kept":
            notes.append("dppo.denominator: kept is biased: for comparison only")
        if dppo.denominator == "estimated_tokens" and prompts is not None:
            notes.append("dppo.denominator: estimated_tokens is a ratio estimator: bias of order 1 / prompts")
        return cls(
            prompts=prompts,
            completions=completions,
            sampler=dppo.sampler,
            drops_zero_advantage=drops_zero_advantage,
            filters_overlong=grpo.overlong_filtering,
            denominator=denominator_kind(
                dppo, token_level=loss_fn.token_level_loss, prunes_prompts=prompts is not None
            ),
            max_new_tokens=max_new_tokens,
            notes=tuple(notes),
        )

    def without_pruning(self) -> "Pruning":
        """The same objective over everything that there is: what the estimates are measured against."""
        full: dict[DenominatorKind, DenominatorKind] = {"kept_sequences": "sequences", "kept_tokens": "tokens"}
        return replace(
            self,
            prompts=None,
            completions=None,
            drops_zero_advantage=False,
            denominator=full.get(self.denominator, self.denominator),
        )


def prompt_keep_probabilities(
    candidates: PromptBatch, *, history: PromptHistory, pruning: Pruning, draws: Draws
) -> FloatArray:
    """p_q of each candidate, float64 [C], from the history alone; 1 for a prompt never seen.

    The draws only break ties of ``top``.
    """
    probabilities = np.ones(len(candidates))
    config = pruning.prompts
    if config is None:
        return probabilities
    if config.policy == "greso":
        assert history.exploration is not None, "the history of policy greso knows its configuration"
        runs = history.zero_runs(candidates.prompt_ids)
        return sampling_designs.round_up_to_ticks(history.exploration.keep_probabilities(runs, config=config.greso))
    scores, seen = history.lookup(candidates.prompt_ids)
    keys = _prompt_keys(candidates, draws=draws)[seen]
    probabilities[seen] = _keep_probabilities(scores[seen], config=config, tie_breakers=keys)
    return probabilities


def prune_prompts(candidates: PromptBatch, *, history: PromptHistory, pruning: Pruning, draws: Draws) -> PromptBatch:
    """The prompts to generate for, in the candidates' order, with weights 1 / p_q (1 for ``greso``).

    Each mini-batch has its own independent draw. ``num_candidates`` stays that of the candidates.
    """
    probabilities = prompt_keep_probabilities(candidates, history=history, pruning=pruning, draws=draws)
    kept = _draw(
        probabilities,
        keys=_prompt_keys(candidates, draws=draws),
        minibatches=candidates.minibatches,
        purpose=Purpose.PROMPT_PRUNING,
        pruning=pruning,
        draws=draws,
    )
    rows = np.flatnonzero(kept)
    reweights = pruning.prompts is None or pruning.prompts.policy != "greso"
    return candidates.take(rows).with_weights(1 / probabilities[rows] if reweights else np.ones(len(rows)))


def completion_keep_probabilities(scores: ScoredBatch, *, pruning: Pruning, draws: Draws) -> FloatArray:
    """p_o of each completion, float64 [N], from the scores of the whole step.

    Terms that are identically zero get 0 and do not count towards the mean score or the rate. The draws only
    break ties of ``top``.
    """
    zero = np.zeros(len(scores), np.bool_)
    if pruning.drops_zero_advantage:
        zero |= scores.advantages == 0
    if pruning.filters_overlong:
        zero |= scores.finish_reasons == FinishReason.LENGTH
    live = np.flatnonzero(~zero)
    probabilities = np.zeros(len(scores))
    config = pruning.completions
    if config is None:
        probabilities[live] = 1.0
        return probabilities
    probabilities[live] = _keep_probabilities(
        _sizes(scores, pruning=pruning, config=config)[live],
        config=config,
        groups=scores.prompt_rows[live] if config.scope == "group" else None,
        tie_breakers=_completion_keys(scores, draws=draws)[live],
    )
    return probabilities


def _sizes(scores: ScoredBatch, *, pruning: Pruning, config: CompletionPruningConfig) -> FloatArray:
    """How large each completion's term is reckoned to be, float64 [N].

    ``surprise`` reckons with the gradient of a token's log-prob by its own logit, 1 - p, known from the sampler;
    tokens add up as if their gradients were at right angles.
    """
    sizes = np.abs(scores.advantages)
    if config.score == "surprise":
        sizes = sizes * scores.surprises
        if pruning.denominator in ("sequences", "kept_sequences"):
            sizes = sizes / scores.completion_lengths
    if config.policy == "neyman":
        # The prompt's weight belongs to the size of the term.
        sizes = sizes * scores.prompts.weights[scores.prompt_rows]
    return sizes


def prune_completions(scores: ScoredBatch, *, pruning: Pruning, draws: Draws) -> tuple[PrunedBatch, ...]:
    """What each optimizer step trains on: one PrunedBatch a mini-batch, with weights 1 / (p_q * p_o).

    Probabilities come from the whole step's scores; each mini-batch has its own independent draw.
    """
    probabilities = completion_keep_probabilities(scores, pruning=pruning, draws=draws)
    prompt_rows = scores.prompt_rows
    minibatches = scores.prompts.minibatches[prompt_rows]
    kept = _draw(
        probabilities,
        keys=_completion_keys(scores, draws=draws),
        minibatches=minibatches,
        purpose=Purpose.COMPLETION_PRUNING,
        pruning=pruning,
        draws=draws,
    )
    prompt_lengths = scores.prompts.tokens.lengths
    plans = []
    for minibatch in range(len(scores.prompts.num_candidates)):
        rows = np.flatnonzero(minibatches == minibatch)
        sequences = rows[kept[rows]]
        prompts = prompt_rows[sequences]
        completion_lengths = scores.completion_lengths[sequences]
        plans.append(
            PrunedBatch(
                minibatch=minibatch,
                sequences=sequences,
                weights=scores.prompts.weights[prompts] / probabilities[sequences],
                lengths=prompt_lengths[prompts] + completion_lengths,
                completion_lengths=completion_lengths,
                advantages=scores.advantages[sequences],
                denominator=minibatch_denominator(
                    scores,
                    kind=pruning.denominator,
                    minibatch=minibatch,
                    generated=rows,
                    kept=sequences,
                    max_new_tokens=pruning.max_new_tokens,
                ),
                candidates=rows,
                keep_probabilities=probabilities[rows],
            )
        )
    return tuple(plans)


def _check_rate(section: PromptPruningConfig | CompletionPruningConfig, *, name: str) -> None:
    if not 0 < section.min_keep_probability <= 1:
        raise ValueError(
            f"dppo.{name}.min_keep_probability: {section.min_keep_probability}; allowed: above 0, at most 1"
        )
    # 1 - 0.8 is a rounding below 0.2.
    if not 0 <= section.rate <= 1 - section.min_keep_probability + 1e-12:
        raise ValueError(
            f"dppo.{name}.rate: {section.rate}; allowed: 0 to 1 - min_keep_probability, "
            f"here {1 - section.min_keep_probability:g}"
        )


def _keep_probabilities(
    scores: FloatArray,
    *,
    config: PromptPruningConfig | CompletionPruningConfig,
    tie_breakers: NDArray[np.uint64],
    groups: IntArray | None = None,
) -> FloatArray:
    """Keep probabilities by the configured policy, on the grid of the sampling designs."""
    rate, least = config.rate, config.min_keep_probability
    match config.policy:
        case "threshold":
            groups = np.zeros(len(scores), np.int64) if groups is None else groups
            result = keep_probabilities.threshold(scores, groups=groups, rate=rate, min_keep_probability=least)
        case "neyman":
            result = keep_probabilities.neyman(scores, rate=rate, min_keep_probability=least)
        case "uniform":
            result = keep_probabilities.uniform(scores, rate=rate, min_keep_probability=least)
        case "top":
            result = keep_probabilities.top(scores, rate=rate, tie_breakers=tie_breakers)
        case "greso":
            raise AssertionError("greso keeps prompts by runs, not by scores")
        case _:
            assert_never(config.policy)
    return sampling_designs.round_up_to_ticks(result)


def _prompt_keys(candidates: PromptBatch, *, draws: Draws) -> NDArray[np.uint64]:
    return draws.words(Purpose.PROMPT_PRUNING, candidates.minibatches, candidates.prompt_ids, candidates.occurrences)


def _completion_keys(scores: ScoredBatch, *, draws: Draws) -> NDArray[np.uint64]:
    prompts, rows = scores.prompts, scores.prompt_rows
    return draws.words(
        Purpose.COMPLETION_PRUNING,
        prompts.minibatches[rows],
        prompts.prompt_ids[rows],
        prompts.occurrences[rows],
        scores.completion_indices,
    )


def _draw(
    probabilities: FloatArray,
    *,
    keys: NDArray[np.uint64],
    minibatches: IntArray,
    purpose: Purpose,
    pruning: Pruning,
    draws: Draws,
) -> NDArray[np.bool_]:
    """Which items are kept, [N]: an independent draw for each mini-batch.

    In a joint draw a mini-batch's choice would depend on an earlier one's, hence on the parameters that
    the earlier one moved.
    """
    if pruning.sampler == "bernoulli":
        return sampling_designs.bernoulli(probabilities, keys=keys)
    kept = np.zeros(len(probabilities), np.bool_)
    for minibatch in np.unique(minibatches):
        rows = np.flatnonzero(minibatches == minibatch)
        start = float(draws.uniform(purpose, minibatch))
        kept[rows] = sampling_designs.systematic(probabilities[rows], keys=keys[rows], start=start)
    return kept
