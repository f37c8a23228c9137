"""How many candidates a step takes."""

from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.batches import PromptBatch, Ragged, ScoredBatch
from dppo_megatron.config.schema import DppoConfig, GrpoConfig, LossConfig, PromptPruningConfig
from dppo_megatron.rl.candidates import FixedNumber, Refill
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.prompts import PromptDataset, Prompts
from dppo_megatron.rl.pruning import Pruning, prompt_keep_probabilities, prune_prompts

NUM_PROMPTS, NUM_ROWS = 16, 60
SEQUENCE_MEAN = LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=False)


def prompts_of(num_minibatches: int = 2) -> Prompts:
    dataset = PromptDataset(
        prompt_ids=np.arange(NUM_ROWS) * 7,
        tokens=Ragged.from_rows([[1]] * NUM_ROWS),
        texts=("",) * NUM_ROWS,
        answers=("",) * NUM_ROWS,
    )
    return Prompts(dataset, num_prompts_per_step=NUM_PROMPTS, num_minibatches=num_minibatches, shuffle=True, seed=1)


def history_of(sizes: np.ndarray) -> PromptHistory:
    count = len(sizes)
    batch = PromptBatch(
        prompt_ids=np.arange(count) * 7,
        occurrences=np.zeros(count, np.int64),
        minibatches=np.zeros(count, np.int64),
        tokens=Ragged.from_rows([[1]] * count),
        texts=("",) * count,
        answers=("",) * count,
        weights=np.ones(count),
        num_candidates=np.array([count]),
    )
    history = PromptHistory(ema_decay=0.9)
    advantages = np.stack([sizes, -sizes], 1).ravel()
    zeros = np.zeros(2 * count, np.int64)
    history.record(ScoredBatch(batch, 2, advantages, advantages, zeros + 1, zeros, advantages))
    return history


def pruning_of(policy: str) -> Pruning:
    section = PromptPruningConfig(policy=policy, rate=0.6, refill=True)  # pyright: ignore[reportArgumentType]
    return Pruning.from_config(
        DppoConfig(prompt_pruning=section), loss_fn=SEQUENCE_MEAN, grpo=GrpoConfig(), max_new_tokens=9
    )


@pytest.mark.parametrize("policy", ["threshold", "neyman", "uniform", "top"])
def test_refill_takes_candidates_until_the_expected_number_kept_is_the_configured_one(policy: str) -> None:
    history = history_of(np.random.default_rng(0).random(NUM_ROWS))
    source = Refill(prompts_of(), history, pruning_of(policy))
    for step in range(6):
        batch = source.next_batch(Draws(3, step))
        p = prompt_keep_probabilities(batch, history=history, pruning=source.pruning, draws=Draws(3, step))
        assert NUM_PROMPTS - 1e-5 <= p.sum() < NUM_PROMPTS + 1.5
        assert NUM_PROMPTS < len(batch) == batch.num_candidates.sum()
        assert np.ptp(batch.num_candidates) <= 1


def test_the_number_of_candidates_depends_on_the_past_and_not_on_the_draws() -> None:
    history = history_of(np.random.default_rng(0).random(NUM_ROWS))
    numbers = {
        len(Refill(prompts_of(), history, pruning_of("threshold")).next_batch(Draws(seed, 0))) for seed in range(20)
    }
    assert len(numbers) == 1


def test_refilled_steps_take_the_stream_s_prompts_one_after_the_other() -> None:
    history, stream = history_of(np.arange(NUM_ROWS) + 1.0), prompts_of()
    refilled = Refill(prompts_of(), history, pruning_of("uniform"))
    taken = np.concatenate([refilled.next_batch(Draws(0, step)).prompt_ids for step in range(4)])
    plain = np.concatenate([FixedNumber(stream).next_batch(Draws(0, 0)).prompt_ids for _ in range(12)])
    np.testing.assert_array_equal(taken, plain[: len(taken)])


def test_under_refill_the_sum_of_weighted_prompts_over_candidates_is_unbiased() -> None:
    history = history_of(np.random.default_rng(0).random(NUM_ROWS))
    pruning = replace(pruning_of("threshold"), sampler="bernoulli")
    values, means = np.sin(np.arange(NUM_ROWS)), []
    for seed in range(3000):
        batch = Refill(prompts_of(), history, pruning).next_batch(Draws(seed, 0))
        kept = prune_prompts(batch, history=history, pruning=pruning, draws=Draws(seed, 0))
        means.append(float(kept.weights @ values[kept.prompt_ids // 7]) / len(batch))
    batch = Refill(prompts_of(), history, pruning).next_batch(Draws(0, 0))
    error = np.std(means) / len(means) ** 0.5
    assert np.mean(means) == pytest.approx(values[batch.prompt_ids // 7].mean(), abs=3 * error)
