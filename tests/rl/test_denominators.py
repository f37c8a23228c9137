"""What the sum of loss terms is divided by."""

from collections.abc import Callable

import numpy as np
import pytest

from dppo_megatron.batches import PromptBatch, Ragged, ScoredBatch
from dppo_megatron.config.schema import DppoConfig
from dppo_megatron.rl.denominators import denominator_kind, minibatch_denominator

# Two mini-batches of five candidates each, of which three were generated; prompt q has weight 1 + q.
PROMPTS = PromptBatch(
    prompt_ids=np.arange(6),
    occurrences=np.zeros(6, np.int64),
    minibatches=np.array([0, 0, 0, 1, 1, 1]),
    tokens=Ragged.from_rows([[1]] * 6),
    texts=("",) * 6,
    answers=("",) * 6,
    weights=np.arange(1.0, 7.0),
    num_candidates=np.array([5, 5]),
)
SCORES = ScoredBatch(
    prompts=PROMPTS,
    num_generations=2,
    rewards=np.zeros(12),
    advantages=np.ones(12),
    completion_lengths=np.arange(1, 13),
    finish_reasons=np.zeros(12, np.int64),
    surprises=np.ones(12),
)


@pytest.mark.parametrize(
    ("denominator", "token_level", "expected"),
    [
        ("candidates", False, lambda rows, kept: 5 * 2),
        ("candidates", True, lambda rows, kept: sum(n + 1 for n in rows)),
        ("constant", True, lambda rows, kept: 5 * 2 * 100),
        ("estimated_tokens", True, lambda rows, kept: sum((n + 1) * (1 + n // 2) for n in rows)),
        ("kept", False, lambda rows, kept: len(kept)),
        ("kept", True, lambda rows, kept: sum(n + 1 for n in kept)),
    ],
)
def test_the_denominator_is_that_of_the_objective(
    denominator, token_level: bool, expected: Callable[[list[int], list[int]], int]
) -> None:
    dppo = DppoConfig(denominator=denominator)
    kind = denominator_kind(dppo, token_level=token_level, prunes_prompts=False)
    for minibatch, rows, kept in ((0, range(6), [1, 2]), (1, range(6, 12), [6, 9, 11])):
        actual = minibatch_denominator(
            SCORES,
            kind=kind,
            minibatch=minibatch,
            generated=np.array(rows),
            kept=np.array(kept),
            max_new_tokens=100,
        )
        assert actual == expected(list(rows), kept)


def test_token_mean_with_prompt_pruning_is_refused_with_the_three_ways_out() -> None:
    with pytest.raises(ValueError, match=r"token_level_loss: false .*constant.*estimated_tokens"):
        denominator_kind(DppoConfig(), token_level=True, prunes_prompts=True)
    denominator_kind(DppoConfig(), token_level=False, prunes_prompts=True)
    denominator_kind(DppoConfig(denominator="constant"), token_level=True, prunes_prompts=True)
    denominator_kind(DppoConfig(denominator="estimated_tokens"), token_level=True, prunes_prompts=True)


@pytest.mark.parametrize("denominator", ["constant", "estimated_tokens"])
def test_a_denominator_that_contradicts_the_sequence_mean_is_refused(denominator) -> None:
    with pytest.raises(ValueError, match=f"dppo.denominator: {denominator}"):
        denominator_kind(DppoConfig(denominator=denominator), token_level=False, prunes_prompts=False)
