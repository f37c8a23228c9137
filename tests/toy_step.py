"""A small step, made up: a random Qwen3, rollouts with weights, and the same update in plain float64 torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
from dppo_megatron.parallel.exchange import gather_scores
from dppo_megatron.parallel.mesh import Mesh

LEARNING_RATE, EPSILON, BETAS, CLIP = 1e-2, 1e-2, (0.9, 0.95), 0.5
"""Adam's epsilon is large so that parameters compare: with 1e-8 the first steps are signs, and a gradient near
zero may flip."""
RECIPE_RATE, RECIPE_EPSILON = 5e-6, 1e-8
"""The schema's defaults: gradients and moments compare under them, parameters hardly move."""
NUM_GENERATIONS, TEMPERATURE, DENOMINATOR = 4, 0.8, 24.0


def make_model(
    directory: Path,
    *,
    tied: bool,
    num_key_value_heads: int = 2,
    seed: int = 0,
    head_dim: int = 16,
    num_layers: int = 2,
) -> None:
    """Write a random Qwen3 with GQA, a head size that is not hidden / heads, and an odd vocabulary."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
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
    """The policy's section for a layout, with the reference's Adam."""
    return PolicyConfig(
        model_name=str(directory),
        precision="bfloat16" if megatron.pipeline_dtype == "bfloat16" else "float32",
        logprob_chunk_size=13,
        megatron_cfg=megatron,
    )


def megatron_config(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    sp: bool = False,
    sharded: bool = False,
    overlap: bool = False,
    bfloat16: bool = False,
    recompute: Literal["full", "selective"] | None = None,
    recipe: bool = False,
) -> MegatronConfig:
    """``policy.megatron_cfg`` of a layout; the rate is constant. ``recipe``: the default rate and epsilon."""
    return MegatronConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        sequence_parallel=sp,
        pipeline_dtype="bfloat16" if bfloat16 else "float32",
        activation_checkpointing=recompute is not None,
        recompute_granularity=recompute or "full",
        optimizer=OptimizerConfig(
            lr=RECIPE_RATE if recipe else LEARNING_RATE,
            min_lr=0.0,
            weight_decay=0.0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=RECIPE_EPSILON if recipe else EPSILON,
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


def make_step(*, num_prompts: int = 6, seed: int = 3, longest_prompt: int | None = None) -> ToyStep:
    """Rollouts with uneven lengths; two thirds kept, with weights. longest_prompt: of the first prompt, tokens."""
    random = np.random.default_rng(seed)
    num = num_prompts * NUM_GENERATIONS
    rows = [random.integers(0, 61, size) for size in random.integers(2, 9, num_prompts)]
    if longest_prompt is not None:
        rows[0] = random.integers(0, 61, longest_prompt)
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
        surprises=rollouts.surprises,
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

    logprobs: of each kept sequence's completion tokens, before the last step. losses, grad_norms: of each step.
    gradients: of the last step, clipped. first, second: Adam's moments, and weights, after the steps.
    """

    logprobs: list[torch.Tensor]
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    first: dict[str, torch.Tensor]
    second: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def gathered_scores(step: ToyStep, mesh: Mesh) -> ScoredBatch:
    """The step's scores, each rank contributing those of its own prompts, and rank + 1 answers without a verdict."""
    prompts = np.arange(mesh.world.rank, len(step.rollouts.prompts), mesh.world.size)
    mine = (prompts[:, None] * NUM_GENERATIONS + np.arange(NUM_GENERATIONS)).ravel()
    return gather_scores(
        share_of(step, rank=mesh.world.rank, size=mesh.world.size),
        step.scores.rewards[mine],
        step.scores.advantages[mine],
        kept=step.scores.prompts,
        num_generations=NUM_GENERATIONS,
        num_failures=mesh.world.rank + 1,
        over=mesh.world,
    )


def reference_update(
    directory: Path, step: ToyStep, *, num_steps: int, kl_coefficient: float, recipe: bool = False
) -> ReferenceUpdate:
    """GRPO with importance weights, sequence mean and (against the first weights) the k3 penalty, by hand.

    It shares no code with the trainer: no packing, no parallelism, no mini-batches of its own.
    """
    model = Qwen3ForCausalLM.from_pretrained(directory, attn_implementation="eager").double()
    first = Qwen3ForCausalLM.from_pretrained(directory, attn_implementation="eager").double()
    parameters = dict(model.named_parameters())
    rate, epsilon = (RECIPE_RATE, RECIPE_EPSILON) if recipe else (LEARNING_RATE, EPSILON)
    optimizer = torch.optim.AdamW(parameters.values(), lr=rate, eps=epsilon, betas=BETAS, weight_decay=0.0)
    logprobs, losses, norms, gradients = [], [], [], {}
    for _ in range(num_steps):
        optimizer.zero_grad()
        logprobs, loss = _backward(model, first, step, kl_coefficient)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)))
        losses.append(loss)
        gradients = {name: tensor.grad.clone() for name, tensor in parameters.items() if tensor.grad is not None}
        optimizer.step()
    return ReferenceUpdate(
        logprobs=logprobs,
        losses=losses,
        grad_norms=norms,
        gradients=gradients,
        first={name: optimizer.state[tensor]["exp_avg"] for name, tensor in parameters.items()},
        second={name: optimizer.state[tensor]["exp_avg_sq"] for name, tensor in parameters.items()},
        weights={name: tensor.detach() for name, tensor in parameters.items()},
    )


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


def _completion_logprobs(model: Qwen3ForCausalLM, prompt: np.ndarray, completion: np.ndarray) -> torch.Tensor:
    ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long)
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None]).squeeze(1)
