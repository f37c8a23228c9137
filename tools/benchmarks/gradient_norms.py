"""Completions of a policy with the exact norms of their gradients, and what is known of them beforehand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dppo_megatron.batches import FloatArray, PromptBatch, RolloutBatch, Sampling
from dppo_megatron.config.schema import DatasetConfig, GrpoConfig, TokenizerConfig
from dppo_megatron.rl.advantages import group_advantages
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.generator import EmbeddedGenerator
from dppo_megatron.rl.prompts import load_prompts, validation_batch
from dppo_megatron.rl.rewards import score_rollouts


@dataclass(frozen=True, slots=True)
class Task:
    """What a policy is asked. data: JSONL. score: (prompt, completion, answer) -> reward."""

    data: Path
    score: Callable[[str, str, str], float]
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    num_prompts: int


@dataclass(frozen=True, slots=True)
class Completions:
    """Completions whose advantage is not zero, [n] float64 each, of prompts that share one batch.

    sizes: of advantages. lengths: completion tokens. costs: prompt and completion tokens. norms: of the gradient of a
    completion's whole log-prob, which the advantage multiplies; exact, over all parameters. rest_sums, rest_roots: of
    1 - probability of each sampled token, the sum and the root of the sum of squares; surprisals: -log-probs; the
    sampler knows them. output_norms, output_layer_norms: of the gradient by the logits and by the output layer's
    weight, known after a pass that keeps logits and the last hidden states.
    """

    sizes: FloatArray
    lengths: FloatArray
    costs: FloatArray
    norms: FloatArray
    rest_sums: FloatArray
    rest_roots: FloatArray
    surprisals: FloatArray
    output_norms: FloatArray
    output_layer_norms: FloatArray

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(slots=True)
class _Scored:
    """A task's own score as a reward, in this process."""

    score: Callable[[str, str, str], float]
    requires_stop: bool = False
    num_failures: int = 0

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> FloatArray:
        return np.array([self.score(*one) for one in zip(prompts, completions, answers, strict=True)], np.float64)

    def close(self) -> None:
        """Nothing is held."""


def measure(directory: Path, task: Task, *, num_generations: int, batch_size: int) -> list[Completions]:
    """Sample at temperature 1, reward, and take every gradient: one entry a batch of ``batch_size`` prompts."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    dataset = load_prompts(
        DatasetConfig(data_path=str(task.data)),
        tokenizer=tokenizer,
        tokenizer_config=TokenizerConfig(name=str(directory), chat_template=None),
        max_prompt_tokens=1024,
    )
    prompts = validation_batch(dataset, max_samples=task.num_prompts)
    engine = EmbeddedGenerator(model.config, dtype=torch.float32, device=torch.device("cpu"), max_cache_tokens=16384)
    engine.load_weights(model.named_parameters(), version=0)
    reward = _Scored(task.score)
    sampling = Sampling(num_generations, 1.0, task.max_new_tokens, task.stop_token_ids)
    result = []
    for start in range(0, len(prompts), batch_size):
        part = prompts.take(np.arange(start, min(start + batch_size, len(prompts))))
        rollouts = engine.generate(part, Draws(0, 0), sampling)
        rewards = score_rollouts(rollouts, reward=reward, tokenizer=tokenizer)
        advantages = group_advantages(
            rewards.reshape(-1, num_generations), grpo=GrpoConfig(use_leave_one_out_baseline=False)
        )
        result.append(_completions(model, rollouts, advantages.ravel(), prompts=part))
    return result


def _completions(model: Any, rollouts: RolloutBatch, advantages: FloatArray, *, prompts: PromptBatch) -> Completions:
    num_generations = len(advantages) // len(prompts)
    live = np.flatnonzero(advantages)
    rows = []
    for row in live.tolist():
        prompt, completion = prompts.tokens[row // num_generations], rollouts.completions[row]
        rows.append([len(completion), len(prompt) + len(completion), *_norms(model, prompt, completion)])
    table = np.array(rows, np.float64).reshape(-1, 8)
    return Completions(np.abs(advantages[live]), *table.T)


def _norms(model: Any, prompt: np.ndarray, completion: np.ndarray) -> list[float]:
    """Of one completion: norms, rest_sums, rest_roots, surprisals, output_norms, output_layer_norms."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
    output = model(ids[None], output_hidden_states=True)
    scored = slice(len(prompt) - 1, len(ids) - 1)
    logits, labels = output.logits[0, scored], ids[len(prompt) :, None]
    logprobs = torch.log_softmax(logits, -1).gather(1, labels)
    gradients = torch.autograd.grad(logprobs.sum(), [value for value in model.parameters() if value.requires_grad])
    norm = torch.stack([gradient.norm().double() for gradient in gradients]).norm()
    with torch.no_grad():
        rest = -torch.expm1(logprobs).squeeze(1)
        by_logits = -torch.softmax(logits, -1)
        by_logits.scatter_add_(1, labels, torch.ones_like(logprobs))
        hidden: Tensor = output.hidden_states[-1][0, scored]
        by_output_layer = ((by_logits @ by_logits.T) * (hidden @ hidden.T)).sum().clamp(min=0).sqrt()
    return [
        float(norm),
        float(rest.sum()),
        float(rest.norm()),
        float(-logprobs.detach().sum()),
        float(by_logits.norm()),
        float(by_output_layer),
    ]
