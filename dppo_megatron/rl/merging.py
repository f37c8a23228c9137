"""Batches put together from parts, and parts of them: what dynamic sampling and the audit do to a step's rollouts.

A prompt's completions lie on the rank that generated for it. Parts that were dealt out one by one no longer follow
the rule prompt number modulo ranks, so a merged ``ScoredBatch`` names the owners.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dppo_megatron.batches import IntArray, PromptBatch, Ragged, RolloutBatch, ScoredBatch
from dppo_megatron.ownership import owners_of, places_on_owners


def take_prompts(
    rollouts: RolloutBatch, scores: ScoredBatch, rows: IntArray, *, rank: int, num_ranks: int
) -> tuple[RolloutBatch, ScoredBatch]:
    """The given prompts with their whole groups, in rising order: this rank's rollouts and everybody's scores.

    rows: of the scored prompts. rank: this one of the ``num_ranks`` generating ranks. Failed rewards stay counted.
    """
    assert (np.diff(rows) > 0).all(), "an owner's prompts keep their order"
    group = scores.num_generations
    owners = owners_of(scores, num_ranks=num_ranks)
    local = places_on_owners(owners)[rows][owners[rows] == rank]
    local_sequences, sequences = _sequences(local, group), _sequences(rows, group)
    logprobs = Ragged(rollouts.sampled_logprobs, rollouts.completions.offsets).take(local_sequences)
    return (
        RolloutBatch(
            prompts=rollouts.prompts.take(local),
            completions=rollouts.completions.take(local_sequences),
            sampled_logprobs=logprobs.values.astype(np.float32),
            finish_reasons=rollouts.finish_reasons[local_sequences],
            version=rollouts.version,
        ),
        ScoredBatch(
            prompts=scores.prompts.take(rows),
            num_generations=group,
            rewards=scores.rewards[sequences],
            advantages=scores.advantages[sequences],
            completion_lengths=scores.completion_lengths[sequences],
            finish_reasons=scores.finish_reasons[sequences],
            surprises=scores.surprises[sequences],
            owners=owners[rows],
            num_failures=scores.num_failures,
        ),
    )


def merge(
    parts: Sequence[tuple[RolloutBatch, ScoredBatch]], *, num_candidates: IntArray, num_ranks: int
) -> tuple[RolloutBatch, ScoredBatch]:
    """One batch after the other; each part's rollouts are this rank's, its scores everybody's.

    num_candidates: int64 [M], that of the merged batch.
    """
    rollouts, scores = [part[0] for part in parts], [part[1] for part in parts]
    assert len({part.version for part in rollouts}) == 1
    prompts = replace(_join_prompts([part.prompts for part in rollouts]), num_candidates=num_candidates)
    return (
        RolloutBatch(
            prompts=prompts,
            completions=_join_ragged([part.completions for part in rollouts]),
            sampled_logprobs=np.concatenate([part.sampled_logprobs for part in rollouts]),
            finish_reasons=np.concatenate([part.finish_reasons for part in rollouts]),
            version=rollouts[0].version,
        ),
        ScoredBatch(
            prompts=replace(_join_prompts([part.prompts for part in scores]), num_candidates=num_candidates),
            num_generations=scores[0].num_generations,
            rewards=np.concatenate([part.rewards for part in scores]),
            advantages=np.concatenate([part.advantages for part in scores]),
            completion_lengths=np.concatenate([part.completion_lengths for part in scores]),
            finish_reasons=np.concatenate([part.finish_reasons for part in scores]),
            surprises=np.concatenate([part.surprises for part in scores]),
            owners=np.concatenate([owners_of(part, num_ranks=num_ranks) for part in scores]),
            num_failures=sum(part.num_failures for part in scores),
        ),
    )


def _sequences(prompts: IntArray, group: int) -> IntArray:
    return (prompts[:, None] * group + np.arange(group)).ravel()


def _join_ragged(parts: Sequence[Ragged]) -> Ragged:
    return Ragged.from_lengths(
        np.concatenate([part.values for part in parts]), np.concatenate([part.lengths for part in parts])
    )


def _join_prompts(parts: Sequence[PromptBatch]) -> PromptBatch:
    return PromptBatch(
        prompt_ids=np.concatenate([part.prompt_ids for part in parts]),
        occurrences=np.concatenate([part.occurrences for part in parts]),
        minibatches=np.concatenate([part.minibatches for part in parts]),
        tokens=_join_ragged([part.tokens for part in parts]),
        texts=tuple(text for part in parts for text in part.texts),
        answers=tuple(answer for part in parts for answer in part.answers),
        weights=np.concatenate([part.weights for part in parts]),
        num_candidates=parts[0].num_candidates,
    )
