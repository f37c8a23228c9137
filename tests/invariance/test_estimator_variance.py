"""How much variance pruning adds, and that many draws on a real model average to the full gradient."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dppo_megatron.batches import FloatArray, PromptBatch, Ragged, ScoredBatch
from dppo_megatron.config.schema import (
    CompletionPruningConfig,
    DppoConfig,
    GrpoConfig,
    LossConfig,
    PromptPruningConfig,
)
from dppo_megatron.rl.advantages import group_advantages
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.keep_probabilities import neyman, threshold, uniform
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.pruning import Pruning, completion_keep_probabilities, prompt_keep_probabilities

LEAST = 0.05


def added_variance(sizes: FloatArray, probabilities: FloatArray) -> float:
    """Sum of (1 / p - 1) a^2 over the sum of a^2: independent draws, score norms alike."""
    return float(((1 / probabilities - 1) * sizes**2).sum() / (sizes**2).sum())


@pytest.mark.parametrize(
    ("rate", "kept", "by_threshold", "by_neyman", "by_uniform"),
    [
        (0.3, 0.80, 0.090, 0.067, 0.248),
        (0.5, 0.67, 0.210, 0.176, 0.493),
        (0.7, 0.53, 0.491, 0.385, 0.877),
        (0.9, 0.40, 1.88, 0.78, 1.50),
    ],
)
def test_the_added_variance_of_each_policy_is_that_of_the_table(
    rate, kept, by_threshold, by_neyman, by_uniform
) -> None:
    """64 prompts x 8 completions, rewards 0 or 1 with Beta(0.6, 0.6) chances, zero advantages dropped for all."""
    rng, rows = np.random.default_rng(1), []
    grpo = GrpoConfig(use_leave_one_out_baseline=False)
    for _ in range(400):
        chances = rng.beta(0.6, 0.6, 64)
        rewards = (rng.random((64, 8)) < chances[:, None]).astype(np.float64)
        sizes = np.abs(group_advantages(rewards, grpo=grpo).ravel())
        sizes = sizes[sizes > 0]
        p = threshold(sizes, groups=np.zeros(len(sizes), np.int64), rate=rate, min_keep_probability=LEAST)
        same = {"rate": 1 - float(p.mean()), "min_keep_probability": LEAST}
        rows.append(
            [p.mean(), *(added_variance(sizes, q) for q in (p, neyman(sizes, **same), uniform(sizes, **same)))]
        )
    means = np.mean(rows, axis=0)
    np.testing.assert_allclose(means, [kept, by_threshold, by_neyman, by_uniform], rtol=0.05)
    assert means[2] <= means[1]


def scores_of(num_prompts: int, group: int) -> tuple[PromptBatch, ScoredBatch]:
    rng = np.random.default_rng(4)
    prompts = PromptBatch(
        prompt_ids=np.arange(num_prompts),
        occurrences=np.zeros(num_prompts, np.int64),
        minibatches=np.zeros(num_prompts, np.int64),
        tokens=Ragged.from_rows(rng.integers(1, 12, (num_prompts, 4)).tolist()),
        texts=("",) * num_prompts,
        answers=("",) * num_prompts,
        weights=np.ones(num_prompts),
        num_candidates=np.array([num_prompts]),
    )
    rewards = (rng.random((num_prompts, group)) < rng.beta(0.6, 0.6, num_prompts)[:, None]).astype(np.float64)
    advantages = group_advantages(rewards, grpo=GrpoConfig()).ravel()
    lengths = rng.integers(1, 7, num_prompts * group)
    return prompts, ScoredBatch(
        prompts,
        group,
        rewards.ravel(),
        advantages,
        lengths,
        np.zeros(len(lengths), np.int64),
        rng.random(len(lengths)),
    )


def block_gradients(model_directory: Path, scores: ScoredBatch) -> dict[str, FloatArray]:
    """Gradient of each sequence's clipped term by parameter block, float64 [N, size]."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="eager")
    parameters = dict(model.named_parameters())
    rng, rows = np.random.default_rng(6), []
    for sequence, advantage in enumerate(scores.advantages.tolist()):
        prompt = scores.prompts.tokens[sequence // scores.num_generations]
        completion = rng.integers(1, 12, scores.completion_lengths[sequence])
        ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long)
        logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        now = torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None]).squeeze(1)
        ratio = (now - now.detach() + torch.tensor(rng.normal(0, 0.3, len(completion)))).exp()
        term = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        gradients = torch.autograd.grad(term, list(parameters.values()))
        rows.append([gradient.double().flatten().numpy() for gradient in gradients])
    return {name: np.stack([row[k] for row in rows]) for k, name in enumerate(parameters)}


def test_over_20000_draws_the_mean_gradient_of_a_real_model_is_the_full_one(tiny_model: Path) -> None:
    """Every parameter block's bias is within three standard errors of zero, both levels pruned."""
    num_prompts, group, num_draws = 12, 4, 20_000
    prompts, scores = scores_of(num_prompts, group)
    history = PromptHistory(ema_decay=0.9)
    history.record(scores)
    dppo = DppoConfig(
        sampler="bernoulli",
        prompt_pruning=PromptPruningConfig(policy="threshold", rate=0.5),
        completion_pruning=CompletionPruningConfig(policy="threshold", rate=0.5),
    )
    loss_fn = LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=False)
    pruning = Pruning.from_config(dppo, loss_fn=loss_fn, grpo=GrpoConfig(), max_new_tokens=6)
    p_prompts = prompt_keep_probabilities(prompts, history=history, pruning=pruning, draws=Draws(0, 0))
    weights = np.zeros((num_draws, len(scores)))
    rng = np.random.default_rng(11)
    kept_prompts = rng.random((num_draws, num_prompts)) < p_prompts
    coins = rng.random((num_draws, len(scores)))
    # Which prompts were kept decides the mean that completions are compared with: each pattern has its own.
    patterns, which = np.unique(kept_prompts, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        rows = np.flatnonzero(pattern)
        sequences = (rows[:, None] * group + np.arange(group)).ravel()
        kept = ScoredBatch(
            prompts.take(rows).with_weights(1 / p_prompts[rows]),
            group,
            scores.rewards[sequences],
            scores.advantages[sequences],
            scores.completion_lengths[sequences],
            scores.finish_reasons[sequences],
            scores.surprises[sequences],
        )
        p = completion_keep_probabilities(kept, pruning=pruning, draws=Draws(0, 0))
        full_weight = np.repeat(kept.prompts.weights, group) / np.maximum(p, 1e-300)
        draws = np.flatnonzero(which == number)
        stays = coins[np.ix_(draws, sequences)] < p
        weights[np.ix_(draws, sequences)] = np.where(stays, full_weight, 0.0)
    assert weights.max() <= 1 / (0.5 * 0.5) + 1e-9
    off, spread = weights.mean(axis=0) - 1, np.cov(weights.T) / num_draws
    for name, gradients in block_gradients(tiny_model, scores).items():
        products = gradients @ gradients.T
        bias, error = np.sqrt(off @ products @ off), np.sqrt(np.trace(spread @ products))
        assert bias < 3 * error, name
        assert error < 0.05 * np.sqrt(products.sum()), "the error is small enough to see a bias"
