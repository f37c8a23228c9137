"""Dynamic sampling by whole groups, and the merging of batches that it and the audit need."""

import numpy as np
import pytest

from dppo_megatron.batches import IntArray, PromptBatch, Ragged, RolloutBatch, ScoredBatch
from dppo_megatron.rl.dynamic_sampling import FirstBatch, WholeGroups
from dppo_megatron.rl.merging import merge, owners_of, places_on_owners, take_prompts

G, RANKS = 2, 3


def batch_of(prompt_ids: IntArray, *, rank: int) -> tuple[RolloutBatch, ScoredBatch]:
    """What ``rank`` of three holds: completion g of prompt q is q, g, ...; q divisible by 3 are all right."""
    count = len(prompt_ids)
    prompts = PromptBatch(
        prompt_ids=prompt_ids,
        occurrences=np.zeros(count, np.int64),
        minibatches=np.zeros(count, np.int64),
        tokens=Ragged.from_rows([[int(q)] for q in prompt_ids]),
        texts=tuple(f"text {q}" for q in prompt_ids),
        answers=("",) * count,
        weights=np.ones(count),
        num_candidates=np.array([count]),
    )
    mine = prompts.share(rank=rank, size=RANKS)
    rows = [[int(q), g, *[9] * (int(q) % 4)] for q in mine.prompt_ids for g in range(G)]
    completions = Ragged.from_rows(rows)
    rollouts = RolloutBatch(
        prompts=mine,
        completions=completions,
        sampled_logprobs=-completions.values.astype(np.float32),
        finish_reasons=np.array([row[0] % 2 for row in rows], np.int64),
        version=4,
    )
    mixed = np.repeat(prompt_ids % 3 != 0, G)
    sequences = np.repeat(prompt_ids, G)
    scores = ScoredBatch(
        prompts=prompts,
        num_generations=G,
        rewards=np.where(mixed, np.tile([1.0, 0.0], count), 1.0),
        advantages=np.where(mixed, np.tile([1.0, -1.0], count), 0.0),
        completion_lengths=2 + sequences % 4,
        finish_reasons=sequences % 2,
        surprises=1.0 + sequences.astype(np.float64),
        num_failures=2,
    )
    return rollouts, scores


def check_holds(rollouts: RolloutBatch, scores: ScoredBatch, *, rank: int) -> None:
    """This rank's rollouts are those of the prompts that it owns, in their order."""
    owners = owners_of(scores, num_ranks=RANKS)
    mine = np.flatnonzero(owners == rank)
    np.testing.assert_array_equal(rollouts.prompts.prompt_ids, scores.prompts.prompt_ids[mine])
    np.testing.assert_array_equal(places_on_owners(owners)[mine], np.arange(len(mine)))
    for place, prompt in enumerate(mine.tolist()):
        for g in range(G):
            tokens = rollouts.completions[place * G + g]
            assert tokens[:2].tolist() == [scores.prompts.prompt_ids[prompt], g]
            assert len(tokens) == scores.completion_lengths[prompt * G + g]
    np.testing.assert_array_equal(rollouts.sampled_logprobs, -rollouts.completions.values.astype(np.float32))


@pytest.mark.parametrize("rank", range(RANKS))
def test_groups_are_collected_whole_over_batches_in_the_candidates_order(rank: int) -> None:
    stream, asked = iter([np.arange(20, 30), np.arange(30, 44)]), []

    def sample_more(earlier: IntArray) -> tuple[RolloutBatch, ScoredBatch]:
        asked.append(earlier.tolist())
        return batch_of(next(stream), rank=rank)

    groups = WholeGroups(num_prompts=15, num_minibatches=2, max_batches=3)
    rollouts, scores = groups.complete(
        *batch_of(np.arange(1, 11), rank=rank), sample_more=sample_more, rank=rank, num_ranks=RANKS
    )
    expected = [q for q in [*range(1, 11), *range(20, 30), *range(30, 44)] if q % 3][:15]
    assert scores.prompts.prompt_ids.tolist() == expected
    assert (scores.advantages != 0).all()
    assert scores.prompts.num_candidates.tolist() == [8, 7]
    assert np.bincount(scores.prompts.minibatches).tolist() == [8, 7]
    assert asked == [list(range(1, 11)), [*range(1, 11), *range(20, 30)]]
    assert scores.surprises.tolist() == [1.0 + q for q in expected for _ in range(G)]
    # Every batch reports two, answers of groups that were dropped among them.
    assert scores.num_failures == 6
    check_holds(rollouts, scores, rank=rank)


def test_a_bound_on_batches_ends_the_search_with_the_counts() -> None:
    groups = WholeGroups(num_prompts=5, num_minibatches=1, max_batches=4)
    with pytest.raises(RuntimeError, match=r"4 of 5 groups .* in 4 batches.*dynamic_sampling_max_gen_batches"):
        groups.complete(
            *batch_of(np.array([3, 6, 7]), rank=0),
            sample_more=lambda earlier: batch_of(np.array([9, 10, 12]) + 9 * len(earlier), rank=0),
            rank=0,
            num_ranks=RANKS,
        )


def test_without_dynamic_sampling_the_first_batch_is_the_step_s() -> None:
    rollouts, scores = batch_of(np.arange(6), rank=1)

    def never(earlier: IntArray) -> tuple[RolloutBatch, ScoredBatch]:
        raise AssertionError(earlier)

    assert FirstBatch().complete(rollouts, scores, sample_more=never, rank=1, num_ranks=RANKS) == (rollouts, scores)


@pytest.mark.parametrize("rank", range(RANKS))
def test_merged_batches_know_who_holds_which_completions(rank: int) -> None:
    parts = [batch_of(ids, rank=rank) for ids in (np.arange(5), np.arange(50, 54))]
    rollouts, scores = merge(parts, num_candidates=np.array([9]), num_ranks=RANKS)
    assert scores.owners is not None
    assert scores.owners.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0]
    check_holds(rollouts, scores, rank=rank)
    taken = take_prompts(rollouts, scores, np.array([1, 4, 5, 8]), rank=rank, num_ranks=RANKS)
    assert taken[1].prompts.prompt_ids.tolist() == [1, 4, 50, 53]
    check_holds(*taken, rank=rank)
