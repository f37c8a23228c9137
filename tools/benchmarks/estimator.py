"""Measure what deciding costs: processor time of a step's keep decisions, memory and time of a large history.

python tools/benchmarks/estimator.py [--prompts 8192] [--generations 16] [--history 10000000]
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from dppo_megatron.batches import FloatArray, PromptBatch, Ragged, ScoredBatch
from dppo_megatron.config.schema import CompletionPruningConfig, DppoConfig, GrpoConfig, LossConfig
from dppo_megatron.rl.advantages import group_advantages
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.pruning import Pruning, prune_completions, prune_prompts

NUM_MINIBATCHES, REPEATS = 4, 5


def milliseconds(action: Callable[[int], object]) -> float:
    """Median processor time of a call; the argument is the call's number."""
    times = []
    for number in range(REPEATS):
        start = time.process_time()
        action(number)
        times.append(time.process_time() - start)
    return 1000 * float(np.median(times))


def batch_of(prompt_ids: FloatArray | np.ndarray) -> PromptBatch:
    """Candidates with prompts of 50 tokens."""
    count = len(prompt_ids)
    minibatches = np.arange(count) * NUM_MINIBATCHES // count
    return PromptBatch(
        prompt_ids=np.asarray(prompt_ids, np.int64),
        occurrences=np.zeros(count, np.int64),
        minibatches=minibatches,
        tokens=Ragged.from_lengths(np.zeros(50 * count, np.int32), np.full(count, 50)),
        texts=("",) * count,
        answers=("",) * count,
        weights=np.ones(count),
        num_candidates=np.bincount(minibatches),
    )


def scored(prompts: PromptBatch, *, num_generations: int) -> ScoredBatch:
    """Rewards of 0 or 1 with chances from Beta(0.6, 0.6)."""
    rng = np.random.default_rng(0)
    chances = rng.beta(0.6, 0.6, len(prompts))
    rewards = (rng.random((len(prompts), num_generations)) < chances[:, None]).astype(np.float64)
    return ScoredBatch(
        prompts=prompts,
        num_generations=num_generations,
        rewards=rewards.ravel(),
        advantages=group_advantages(rewards, grpo=GrpoConfig()).ravel(),
        completion_lengths=rng.integers(1, 1000, rewards.size),
        finish_reasons=np.zeros(rewards.size, np.int64),
        surprises=rng.random(rewards.size),
    )


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8192)
    parser.add_argument("--generations", type=int, default=16)
    parser.add_argument("--history", type=int, default=10_000_000)
    options = parser.parse_args()
    ids = np.sort(np.random.default_rng(1).integers(-(2**62), 2**62, options.history))
    state = {
        "prompt_ids": ids,
        "scores": np.random.default_rng(2).random(len(ids)),
        "zero_runs": np.zeros(len(ids), np.int16),
        "exploration": np.zeros(0),
    }
    history = PromptHistory.from_state(state, ema_decay=0.9)
    candidates = batch_of(np.random.default_rng(3).choice(ids, options.prompts, replace=False))
    loss_fn = LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=False)
    for policy in ("threshold", "neyman"):
        dppo = DppoConfig(completion_pruning=CompletionPruningConfig(policy=policy))
        pruning = Pruning.from_config(dppo, loss_fn=loss_fn, grpo=GrpoConfig(), max_new_tokens=1000)
        prompts = milliseconds(
            lambda step, pruning=pruning: prune_prompts(
                candidates, history=history, pruning=pruning, draws=Draws(0, step)
            )
        )
        kept = prune_prompts(candidates, history=history, pruning=pruning, draws=Draws(0, 0))
        scores = scored(kept, num_generations=options.generations)
        record = milliseconds(lambda _, scores=scores: history.record(scores))
        completions = milliseconds(
            lambda step, pruning=pruning, scores=scores: prune_completions(
                scores, pruning=pruning, draws=Draws(0, step)
            )
        )
        print(
            f"{policy}: {options.prompts} prompts x {options.generations}, history of {len(history)}: "
            f"prompts {prompts:.1f} ms, history {record:.1f} ms, completions {completions:.1f} ms"
        )
    size = sum(values.nbytes for values in history.state().values())
    print(f"history of {len(history)} prompts: {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
