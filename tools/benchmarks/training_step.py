"""A training step of the policy on packed rows against a plain loop of Hugging Face's model, torch and AdamW.

python -m tools.benchmarks.training_step models/tiny-sort [--turns 3] [--profile] [--json]

Both take the same sequences, advantages and weights through the GRPO loss, clip the gradient to a norm of 1 and let
AdamW step. The plain loop does it in two ways: padded on the right to the longest of the batch, where causal
attention needs no mask; and packed, sequences end to end in one row with positions that begin anew, of which
transformers makes a block-diagonal mask. Micro-batches hold what our rows hold. Where the norms of the first
gradients differ the benchmark ends with an error: the three did not do the same work. They take turns in one
process, on one thread, and planning and layout count.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dppo_megatron import device
from dppo_megatron.batches import PackedRow
from dppo_megatron.config.schema import OptimizerConfig
from tools.benchmarks.packed_training import (
    DENOMINATOR,
    SIZES,
    Batch,
    lay_out_batch,
    make_policy,
    model_and_batch,
    print_profile,
    train,
)
from tools.benchmarks.timing import interleaved_medians

CLIP_RANGE = 0.2


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to take the step. trained_tokens: padding included. seconds: of processor time, median step.

    tokens_per_second: of the batch's own tokens, which are the same for all. ours_faster: seconds over ours.
    """

    name: str
    trained_tokens: int
    seconds: float
    tokens_per_second: float
    ours_faster: float


@dataclass(frozen=True, slots=True)
class Result:
    """All contenders on one batch, ours first."""

    batch: str
    num_parameters: int
    num_sequences: int
    num_tokens: int
    contenders: tuple[Contender, ...]


class PlainLoop:
    """A training step as one writes it without a framework."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=OptimizerConfig().lr, weight_decay=0.0)

    def step(self, rows: list[PackedRow], *, padded: bool) -> float:
        """One optimizer step; returns the gradient's norm before clipping.

        padded: the rows hold sequences of one length, and go through the model as a batch [B, T] of them.
        """
        self.optimizer.zero_grad()
        for row in rows:
            shape = (len(row.sequence_lengths), -1) if padded else (1, -1)
            self._loss(row, shape).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(norm)

    def _loss(self, row: PackedRow, shape: tuple[int, int]) -> Tensor:
        tokens, positions, labels, advantages, coefficients = (
            part.view(shape) for part in (row.token_ids, row.positions, row.labels, row.advantages, row.coefficients)
        )
        logits = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        chosen = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        ratio = (chosen - chosen.detach()).exp()
        clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
        terms = -torch.minimum(ratio * advantages, clipped * advantages)
        return (terms * coefficients).sum() / DENOMINATOR


def measure(directory: Path, batch: Batch, *, turns: int, profiled: bool) -> Result:
    """Time a batch in all ways. Raises RuntimeError where they do not take the same step."""
    policy, packed_loop, padded_loop = make_policy(directory), PlainLoop(directory), PlainLoop(directory)
    longest = int(batch.lengths.max())
    ways: tuple[tuple[str, int, Callable[[list[PackedRow]], float]], ...] = (
        ("ours, packed", 1, lambda rows: train(policy, rows).grad_norm),
        ("plain, packed", 1, partial(packed_loop.step, padded=False)),
        ("plain, padded", longest, partial(padded_loop.step, padded=True)),
    )
    actions = [partial(_lay_out_and_step, batch, multiple, step) for _, multiple, step in ways]
    norms = [action() for action in actions]
    if not np.allclose(norms, norms[0], rtol=1e-3):
        raise RuntimeError(f"{batch.name}: the gradients' norms differ: {norms}")
    seconds = interleaved_medians(actions, turns=turns)
    contenders = []
    for (name, multiple, _), action, spent in zip(ways, actions, seconds, strict=True):
        trained = sum(len(row.token_ids) for row in lay_out_batch(batch, sequence_multiple=multiple))
        rate = float(batch.lengths.sum()) / spent
        contenders.append(Contender(name, trained, spent, rate, spent / seconds[0]))
        if profiled:
            print(f"{batch.name}, {name}")
            print_profile(action)
    return Result(
        batch=batch.name,
        num_parameters=sum(parameter.numel() for parameter in policy.own_parameters()),
        num_sequences=len(batch.lengths),
        num_tokens=int(batch.lengths.sum()),
        contenders=tuple(contenders),
    )


def _lay_out_and_step(batch: Batch, multiple: int, step: Callable[[list[PackedRow]], float]) -> float:
    return step(lay_out_batch(batch, sequence_multiple=multiple))


def print_table(results: list[Result]) -> None:
    """Print the results as a Markdown table."""
    print("| model | sequences, tokens | step | trained tokens | ms a step | tokens/s | over ours |")
    print("|---|---|---|---|---|---|---|")
    for result in results:
        for one in result.contenders:
            print(
                f"| {result.batch} ({result.num_parameters:,}) | {result.num_sequences}, {result.num_tokens:,}"
                f" | {one.name} | {one.trained_tokens:,} | {1e3 * one.seconds:.1f} | {one.tokens_per_second:,.0f}"
                f" | {one.ours_faster:.2f} |"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the quickstart's, with its data (tools/make_tiny_model.py)")
    parser.add_argument("--turns", type=int, default=3, help="of the 30M model; the smaller ones' are more")
    parser.add_argument("--sequences", type=int, default=32, help="of the random models' batches")
    parser.add_argument("--max-response", type=int, default=512, help="of the random models' batches, tokens")
    parser.add_argument("--only", choices=["quickstart", *SIZES], help="one model")
    parser.add_argument("--profile", action="store_true", help="print where the processor time of a step goes")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    device.set_num_threads()
    device.start_process_group()
    results = []
    for name, more_turns in (("quickstart", 10), ("2M", 3), ("30M", 1)):
        if options.only in (None, name):
            with model_and_batch(name, options) as (directory, batch):
                turns = more_turns * options.turns
                results.append(measure(directory, batch, turns=turns, profiled=options.profile))
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        print_table(results)


if __name__ == "__main__":
    main()
