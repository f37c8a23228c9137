"""The estimator through megatron-core on several layouts, against float64 torch written out by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from estimator_worker import CASES, GSPO, MASKED, minibatches
from safetensors.torch import load_file
from torch import Tensor
from toy_step import BETAS, CLIP, EPSILON, LEARNING_RATE, NUM_GENERATIONS, TEMPERATURE, ToyStep, make_model, make_step
from transformers import Qwen3ForCausalLM

from dppo_megatron.batches import PrunedBatch
from dppo_megatron.config.schema import LossConfig

WORKER = Path(__file__).with_name("estimator_worker.py")
ALONE = tuple(name for name in CASES if name.startswith("one"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, launch) -> Path:
    """The model's directory, with the outcome of every case beside it."""
    directory = tmp_path_factory.mktemp("estimator") / "model"
    make_model(directory, tied=True)
    launch(WORKER, directory, directory.parent, *ALONE, num_processes=1)
    launch(WORKER, directory, directory.parent, *(name for name in CASES if name not in ALONE), num_processes=2)
    return directory


def logprobs_of(model: Qwen3ForCausalLM, step: ToyStep, sequence: int) -> Tensor:
    prompt = step.scores.prompts.tokens[sequence // NUM_GENERATIONS]
    completion = step.rollouts.completions[sequence]
    ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long)
    logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None]).squeeze(1)


def term(now: Tensor, old: Tensor, sampled: Tensor, advantage: float, config: LossConfig) -> Tensor:
    """One sequence's mean token term."""
    log_ratio = now - old
    if config is GSPO:
        log_ratio = log_ratio.mean() + 0 * log_ratio
    ratio, bound = log_ratio.exp(), config.ratio_clip_max
    terms = -torch.minimum(ratio * advantage, ratio.clamp(1 - bound, 1 + bound) * advantage)
    if config is MASKED:
        geometric_mean = math.exp(float((old - sampled).mean()))
        terms = terms * (old - sampled).exp() * (0.1 <= geometric_mean <= 6.0)
    return terms.mean()


def loss_by_hand(
    model: Qwen3ForCausalLM, step: ToyStep, plan: PrunedBatch, olds: dict[int, Tensor], config: LossConfig
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for index, sequence in enumerate(plan.sequences.tolist()):
        offsets = step.rollouts.completions.offsets
        sampled = torch.tensor(step.rollouts.sampled_logprobs[offsets[sequence] : offsets[sequence + 1]])
        now = logprobs_of(model, step, sequence)
        one = term(now, olds[sequence], sampled.double(), float(plan.advantages[index]), config)
        total = total + float(plan.weights[index]) * one
    return total / plan.denominator


def gradient_by_hand(directory: Path, config: LossConfig) -> dict[str, Tensor]:
    """Adam's step on the first mini-batch, then the second's gradient; old log-probs are those before both."""
    model = Qwen3ForCausalLM.from_pretrained(directory, attn_implementation="eager").double()
    step = make_step()
    with torch.no_grad():
        olds = {sequence: logprobs_of(model, step, sequence) for sequence in step.plan.sequences.tolist()}
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE, eps=EPSILON, betas=BETAS, weight_decay=0.0)
    first, second = minibatches(step)
    loss_by_hand(model, step, first, olds, config).backward()
    torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    loss_by_hand(model, step, second, olds, config).backward()
    return {name: value.grad for name, value in parameters.items() if value.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_of_the_second_minibatch_with_uneven_survivors_is_the_formula_by_hand(
    name: str, model: Path
) -> None:
    # float32 against float64: 2e-5 of a tensor's largest gradient.
    outcome, expected = load_file(model.parent / f"{name}.safetensors"), gradient_by_hand(model, CASES[name].loss)
    assert outcome.keys() - {"decisions"} == expected.keys()
    for key, gradient in expected.items():
        error = (outcome[key].double() - gradient).abs().max() / gradient.abs().max()
        assert float(error) < 2e-5, key


def test_a_step_s_decisions_take_one_all_gather_and_one_all_reduce_that_count_all_ranks_failures(model: Path) -> None:
    for name in CASES:
        # Rank r reports r + 1 failed rewards.
        *calls, failures = load_file(model.parent / f"{name}.safetensors")["decisions"].tolist()
        assert calls == ([0, 0] if name in ALONE else [1, 1]), name
        assert failures == (1 if name in ALONE else 3), name
