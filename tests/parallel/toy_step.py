"""A small step, made up: a random Qwen3, rollouts with weights, and the same update in plain float64 torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dppo_megatron.batches import PromptBatch, PrunedBatch, Ragged, RolloutBatch, ScoredBatch
from dppo_megatron.config.schema import (
    DistributedDataParallelConfig,
    MegatronConfig,
    OptimizerConfig,
    PolicyConfig,
    SchedulerConfig,
)

LEARNING_RATE, EPSILON, BETAS, CLIP = 1e-2, 1e-2, (0.9, 0.95), 0.5
"""Adam's epsilon is large so that parameters compare: with 1e-8 the first steps are signs, and a gradient near
zero may flip."""
NUM_GENERATIONS, TEMPERATURE, DENOMINATOR = 4, 0.8, 24.0


def make_model(directory: Path, *, tied: bool, seed: int = 0) -> None:
    """Write a random two-layer Qwen3 with GQA, a head size that is not hidden / heads, and an odd vocabulary."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def policy_config(directory: Path, megatron: MegatronConfig) -> PolicyConfig:
    """The policy's section for a layout, in float32, with the reference's Adam."""
    return PolicyConfig(model_name=str(directory), precision="float32", logprob_chunk_size=13, megatron_cfg=megatron)


def megatron_config(
    *, tp: int = 1, pp: int = 1, cp: int = 1, sp: bool = False, sharded: bool = False, overlap: bool = False
) -> MegatronConfig:
    """``policy.megatron_cfg`` of a layout; the rate is constant."""
    return MegatronConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        sequence_parallel=sp,
        pipeline_dtype="float32",
        optimizer=OptimizerConfig(
            lr=LEARNING_RATE,
            min_lr=0.0,
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPSILON,
            clip_grad=CLIP,
            use_distributed_optimizer=sharded,
        ),
        scheduler=SchedulerConfig(
            lr_warmup_iters=0, lr_warmup_init=0.0, start_weight_decay=0.0, end_weight_decay=0.0
        ),
        distributed_data_parallel_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
        ),
    )


@dataclass(frozen=True)
class ToyStep:
    """Rollouts of six prompts as if sampled by one process, and what pruning kept of them."""

    rollouts: RolloutBatch
    scores: ScoredBatch
    plan: PrunedBatch


def make_step(*, num_prompts: int = 6, seed: int = 3) -> ToyStep:
    """Rollouts with uneven lengths; two thirds kept, with weights."""
    random = np.random.default_rng(seed)
    num = num_prompts * NUM_GENERATIONS
    rows = [random.integers(0, 61, size) for size in random.integers(2, 9, num_prompts)]
    completions = [random.integers(0, 61, size) for size in random.integers(1, 12, num)]
    prompts = PromptBatch(
        prompt_ids=np.arange(num_prompts),
        occurrences=np.zeros(num_prompts, np.int64),
        minibatches=np.zeros(num_prompts, np.int64),
        tokens=Ragged.from_rows([row.tolist() for row in rows]),
        texts=("",) * num_prompts,
        answers=("",) * num_prompts,
        weights=np.ones(num_prompts),
        num_candidates=np.array([num_prompts]),
    )
    ragged = Ragged.from_rows([row.tolist() for row in completions])
    rollouts = RolloutBatch(
        prompts=prompts,
        completions=ragged,
        sampled_logprobs=random.normal(-2, 0.1, len(ragged.values)).astype(np.float32),
        finish_reasons=np.zeros(num, np.int64),
        version=0,
    )
    advantages = random.normal(size=num)
    scores = ScoredBatch(
        prompts=prompts,
        num_generations=NUM_GENERATIONS,
        rewards=advantages,
        advantages=advantages,
        completion_lengths=ragged.lengths,
        finish_reasons=rollouts.finish_reasons,
    )
    kept = np.flatnonzero(random.random(num) < 2 / 3)
    plan = PrunedBatch(
        minibatch=0,
        sequences=kept,
        weights=random.uniform(1, 4, len(kept)),
        lengths=(prompts.tokens.lengths[kept // NUM_GENERATIONS] + ragged.lengths[kept]),
        completion_lengths=ragged.lengths[kept],
        advantages=advantages[kept],
        denominator=DENOMINATOR,
        candidates=np.arange(num),
        keep_probabilities=np.ones(num),
    )
    return ToyStep(rollouts, scores, plan)


def share_of(step: ToyStep, *, rank: int, size: int) -> RolloutBatch:
    """What rank ``rank`` of ``size`` would have sampled."""
    prompts = np.arange(rank, len(step.rollouts.prompts), size)
    rows = (prompts[:, None] * NUM_GENERATIONS + np.arange(NUM_GENERATIONS)).ravel()
    logprobs = Ragged(step.rollouts.sampled_logprobs, step.rollouts.completions.offsets)
    return RolloutBatch(
        prompts=step.rollouts.prompts.take(prompts),
        completions=step.rollouts.completions.take(rows),
        sampled_logprobs=logprobs.take(rows).values.astype(np.float32),
        finish_reasons=step.rollouts.finish_reasons[rows],
        version=0,
    )


@dataclass(frozen=True)
class ReferenceUpdate:
    """What the same update gives in float64, one sequence at a time.

    logprobs: of each kept sequence's completion tokens. gradients: before clipping. weights: after the step.
    """

    logprobs: list[torch.Tensor]
    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def reference_update(
    directory: Path, step: ToyStep, *, num_steps: int = 1, kl_coefficient: float = 0.0
) -> ReferenceUpdate:
    """GRPO with importance weights, sequence mean and (against the first weights) the k3 penalty, by hand.

    It shares no code with the trainer: no packing, no parallelism, no mini-batches of its own.
    """
    model = Qwen3ForCausalLM.from_pretrained(directory, attn_implementation="eager").double()
    first = Qwen3ForCausalLM.from_pretrained(directory, attn_implementation="eager").double()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, eps=EPSILON, betas=BETAS, weight_decay=0.0)
    for _ in range(num_steps - 1):
        _backward(model, first, step, kl_coefficient)
        _step(optimizer, parameters)
    logprobs, loss = _backward(model, first, step, kl_coefficient)
    gradients = {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}
    norm = _step(optimizer, parameters)
    weights = {name: parameter.detach() for name, parameter in parameters.items()}
    return ReferenceUpdate(logprobs, loss, norm, gradients, weights)


def _backward(
    model: Qwen3ForCausalLM, first: Qwen3ForCausalLM, step: ToyStep, kl_coefficient: float
) -> tuple[list[torch.Tensor], float]:
    logprobs, loss = [], torch.zeros((), dtype=torch.float64)
    for index, sequence in enumerate(step.plan.sequences):
        prompt = step.scores.prompts.tokens[int(sequence) // NUM_GENERATIONS]
        completion = step.rollouts.completions[int(sequence)]
        logp = _completion_logprobs(model, prompt, completion)
        terms = -(logp - logp.detach()).exp() * float(step.plan.advantages[index])
        if kl_coefficient:
            with torch.no_grad():
                reference = _completion_logprobs(first, prompt, completion)
            log_ratio = reference - logp
            terms = terms + kl_coefficient * (log_ratio.exp() - 1 - log_ratio)
        loss = loss + terms.mean() * float(step.plan.weights[index]) / DENOMINATOR
        logprobs.append(logp.detach())
    loss.backward()
    return logprobs, float(loss.detach())


def _step(optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]) -> float:
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def _completion_logprobs(model: Qwen3ForCausalLM, prompt: np.ndarray, completion: np.ndarray) -> torch.Tensor:
    ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long)
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None]).squeeze(1)
