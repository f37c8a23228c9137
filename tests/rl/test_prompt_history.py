"""The history of prompts' advantage signal."""

from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.batches import PromptBatch, Ragged, ScoredBatch
from dppo_megatron.config.schema import GresoConfig
from dppo_megatron.rl.greso import Exploration
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.prompts import PromptDataset, _hash_tokens


def scored(prompt_ids: list[int], advantages: list[list[float]]) -> ScoredBatch:
    count, generations = np.shape(advantages)
    prompts = PromptBatch(
        prompt_ids=np.array(prompt_ids, np.int64),
        occurrences=np.arange(count),
        minibatches=np.zeros(count, np.int64),
        tokens=Ragged.from_rows([[1]] * count),
        texts=("",) * count,
        answers=("",) * count,
        weights=np.ones(count),
        num_candidates=np.array([count]),
    )
    return ScoredBatch(
        prompts=prompts,
        num_generations=generations,
        rewards=np.zeros(count * generations),
        advantages=np.array(advantages, np.float64).ravel(),
        completion_lengths=np.ones(count * generations, np.int64),
        finish_reasons=np.zeros(count * generations, np.int64),
        surprises=np.ones(count * generations),
    )


def score_of(history: PromptHistory, prompt_id: int) -> float:
    scores, seen = history.lookup(np.array([prompt_id]))
    assert seen[0]
    return float(scores[0])


def test_a_first_visit_sets_the_mean_absolute_advantage() -> None:
    history = PromptHistory(ema_decay=0.9)
    history.record(scored([7, -3], [[1.0, -2.0], [0.0, 0.0]]))
    assert score_of(history, 7) == pytest.approx(1.5, rel=1e-9)
    assert score_of(history, -3) == 0


def test_later_visits_move_the_average_by_one_minus_the_decay() -> None:
    history = PromptHistory(ema_decay=0.75)
    for size in (1.0, 3.0, 0.0):
        history.record(scored([5], [[size, -size]]))
    assert score_of(history, 5) == pytest.approx(0.75 * (0.75 * 1.0 + 0.25 * 3.0), rel=1e-9)


def test_a_prompt_that_occurs_twice_in_a_step_is_visited_once_by_the_mean() -> None:
    history = PromptHistory(ema_decay=0.5)
    history.record(scored([5], [[1.0, 1.0]]))
    history.record(scored([5, 9, 5], [[2.0, -2.0], [8.0, 8.0], [0.0, 4.0]]))
    assert score_of(history, 5) == pytest.approx(0.5 * 1.0 + 0.5 * 2.0, rel=1e-9)
    assert len(history) == 2


def test_a_prompt_never_recorded_is_not_seen() -> None:
    history = PromptHistory(ema_decay=0.9)
    assert not history.lookup(np.array([1, 2]))[1].any()
    history.record(scored([1], [[1.0, 1.0]]))
    scores, seen = history.lookup(np.array([0, 1, 2]))
    np.testing.assert_array_equal(seen, [False, True, False])
    np.testing.assert_array_equal(scores[[0, 2]], 0)


def test_the_order_of_a_steps_prompts_does_not_change_a_bit() -> None:
    rng = np.random.default_rng(0)
    ids, advantages = rng.integers(0, 40, 100), rng.standard_normal((100, 3))
    states = []
    for _ in range(10):
        order = rng.permutation(100)
        history = PromptHistory(ema_decay=0.9)
        history.record(scored(ids[order].tolist(), advantages[order].tolist()))
        states.append(history.state())
    for state in states[1:]:
        np.testing.assert_array_equal(state["prompt_ids"], states[0]["prompt_ids"])
        np.testing.assert_array_equal(state["scores"], states[0]["scores"])


def test_it_agrees_with_a_plain_dictionary_past_several_merges_and_restarts() -> None:
    rng = np.random.default_rng(1)
    history, expected = PromptHistory(ema_decay=0.8), dict[int, float]()
    for step in range(12):
        ids = rng.choice(np.arange(-9000, 9000), 1500, replace=False)
        sizes = rng.random(1500)
        history.record(scored(ids.tolist(), [[size, -size] for size in sizes]))
        for key, size in zip(ids.tolist(), sizes.tolist(), strict=True):
            expected[key] = 0.8 * expected[key] + 0.2 * size if key in expected else size
        if step % 4 == 3:
            history = PromptHistory.from_state(history.state(), ema_decay=0.8)
    keys = np.array(list(expected), np.int64)
    scores, seen = history.lookup(keys)
    assert seen.all()
    assert len(history) == len(expected)
    np.testing.assert_allclose(scores, list(expected.values()), atol=1e-8)


def test_a_restart_does_not_change_a_bit() -> None:
    rng = np.random.default_rng(2)
    steps = [scored(rng.integers(0, 50, 20).tolist(), rng.random((20, 2)).tolist()) for _ in range(6)]
    through, restarted = PromptHistory(ema_decay=0.9), PromptHistory(ema_decay=0.9)
    for step in steps:
        through.record(step)
        restarted.record(step)
        restarted = PromptHistory.from_state(restarted.state(), ema_decay=0.9)
    np.testing.assert_array_equal(through.state()["prompt_ids"], restarted.state()["prompt_ids"])
    np.testing.assert_array_equal(through.state()["scores"], restarted.state()["scores"])


def test_a_saved_state_does_not_change_with_later_steps() -> None:
    history = PromptHistory(ema_decay=0.5)
    history.record(scored([1, 2], [[1.0, 1.0], [1.0, 1.0]]))
    restored = PromptHistory.from_state(state := history.state(), ema_decay=0.5)
    history.record(scored([1], [[3.0, 3.0]]))
    restored.record(scored([2], [[3.0, 3.0]]))
    np.testing.assert_array_equal(state["scores"], [1.0, 1.0])


def test_a_state_that_is_not_sorted_is_refused() -> None:
    with pytest.raises(ValueError, match="rising"):
        PromptHistory.from_state(
            {"prompt_ids": np.array([2, 1]), "scores": np.zeros(2), "zero_runs": np.zeros(2)}, ema_decay=0.9
        )


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_outside_its_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="ema_decay"):
        PromptHistory(ema_decay=decay)


def test_runs_of_equal_rewards_are_counted_and_broken_by_a_mixed_group() -> None:
    history, ids = PromptHistory(ema_decay=0.9), np.array([1, 2, 3])
    right = replace(scored([1, 2], [[0, 0], [0, 0]]), rewards=np.array([1.0, 1.0, 0.0, 0.0]))
    for _ in range(3):
        history.record(right)
    assert history.zero_runs(ids).tolist() == [3, -3, 0]
    history.record(scored([2], [[1.0, -1.0]]))
    assert history.zero_runs(ids).tolist() == [3, 0, 0]
    history.record(right)
    assert history.zero_runs(ids).tolist() == [4, -1, 0]


def test_the_exploration_of_greso_follows_the_record_and_survives_a_restart() -> None:
    greso = GresoConfig()
    history = PromptHistory(ema_decay=0.9, greso=greso)
    history.record(scored([1, 2], [[0.0, 0.0], [1.0, -1.0]]))  # half are all wrong, none all right
    assert history.exploration == Exploration(0.51, 0.49)
    restored = PromptHistory.from_state(history.state(), ema_decay=0.9, greso=greso)
    assert restored.exploration == history.exploration
    assert restored.zero_runs(np.array([1, 2])).tolist() == [-1, 0]
    assert PromptHistory(ema_decay=0.9).exploration is None


def test_a_prompt_is_known_again_in_reordered_and_extended_data() -> None:
    def dataset(texts: list[str]) -> PromptDataset:
        tokens = Ragged.from_rows([[ord(c) for c in text] for text in texts])
        ids = np.array([_hash_tokens(tokens[row]) for row in range(len(texts))])
        return PromptDataset(prompt_ids=ids, tokens=tokens, texts=tuple(texts), answers=tuple(texts))

    history, texts = PromptHistory(ema_decay=0.9), ["one", "two", "three"]
    history.record(scored(dataset(texts).prompt_ids.tolist(), [[0.1, -0.1], [0.2, -0.2], [0.3, -0.3]]))
    scores, seen = history.lookup(dataset(["new", "three", "one", "two", "other"]).prompt_ids)
    assert seen.tolist() == [False, True, True, True, False]
    np.testing.assert_allclose(scores, [0, 0.3, 0.1, 0.2, 0], rtol=1e-9)
