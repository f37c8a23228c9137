"""Measure a training step on packed rows against the same sequences padded to the longest, on the CPU.

python -m tools.benchmarks.packed_training models/tiny-sort [--turns 3] [--profile] [--json]

Two batches: the quickstart's model with prompts and right answers of its data, and a random Qwen3 of 30M parameters
with lengths drawn as tools/benchmarks/packing.py draws them. Both sides take the same sequences through planning,
layout and ``Policy.update``; a padded row holds as many sequences of the longest's length as its capacity does. Steps
of one row and of nine rows that hold next to nothing tell what a step and a row cost whatever is in them. All take
turns in one process, on one thread.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import IntArray, PackedRow, Ragged, TrainStats
from dppo_megatron.config.schema import (
    DistributedDataParallelConfig,
    LossConfig,
    MegatronConfig,
    OptimizerConfig,
    PolicyConfig,
    SchedulerConfig,
    SequencePackingConfig,
)
from dppo_megatron.parallel.mesh import lay_out
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.parallel.sequence_layout import RowSequences, lay_out_row
from dppo_megatron.plan import Layout
from dppo_megatron.rl.loss import PolicyLoss
from dppo_megatron.rl.packing import plan_rows
from tools.benchmarks.packing import draw_lengths
from tools.benchmarks.timing import interleaved_medians

SIZES = {"2M": (192, 4, 3, 1024), "30M": (512, 8, 8, 11264)}  # hidden size, layers, heads, vocabulary
DENOMINATOR = 100.0  # of the loss; any number


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences to train on, made up but for their lengths. prompts, completions: [K] tokens of each."""

    name: str
    prompts: IntArray
    completions: IntArray
    capacity: int
    vocab_size: int

    @property
    def lengths(self) -> IntArray:
        """Tokens of whole sequences, [K]."""
        return self.prompts + self.completions


@dataclass(frozen=True, slots=True)
class Side:
    """One way to lay a batch out.

    trained_tokens: padding included. seconds: of processor time, median step; fixed_seconds: of it what the step and
    its rows would cost without tokens.
    """

    num_rows: int
    trained_tokens: int
    density: float
    seconds: float
    fixed_seconds: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both ways; the ratios are of padded over packed. rest_ratio: of the times without the fixed ones."""

    batch: str
    num_parameters: int
    num_sequences: int
    capacity: int
    longest: int
    packed: Side
    padded: Side
    token_ratio: float
    time_ratio: float
    rest_ratio: float


def quickstart_batch(directory: Path, *, num_sequences: int = 256) -> Batch:
    """Prompts and right answers of the quickstart: a character a token, and the answer's end."""
    lines = (directory / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:num_sequences]
    rows = [json.loads(line) for line in lines]
    prompts = np.array([len(row["input"]) for row in rows], np.int64)
    completions = np.array([len(row["output"]) + 1 for row in rows], np.int64)
    return Batch("quickstart", prompts, completions, capacity=1024, vocab_size=64)


def random_batch(size: str, *, num_sequences: int, max_response: int, capacity: int) -> Batch:
    """Lengths as in GRPO, a quarter of each the prompt, for a model of SIZES."""
    lengths = draw_lengths(num_sequences, max_response=max_response)
    prompts = np.maximum(lengths // 4, 1)
    return Batch(size, prompts, lengths - prompts, capacity=capacity, vocab_size=SIZES[size][-1])


def make_random_model(directory: Path, size: str) -> None:
    """Write a random Qwen3 of about that many parameters."""
    hidden, layers, heads, vocab_size = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(directory)


def make_policy(directory: Path) -> Policy:
    """The trainer's policy on one process, in float32."""
    config = PolicyConfig(
        model_name=str(directory),
        precision="float32",
        megatron_cfg=MegatronConfig(
            pipeline_dtype="float32",
            optimizer=OptimizerConfig(clip_grad=1.0, use_distributed_optimizer=False),
            scheduler=SchedulerConfig(start_weight_decay=0.0, end_weight_decay=0.0),
            distributed_data_parallel_config=DistributedDataParallelConfig(overlap_grad_reduce=False),
        ),
    )
    architecture = read_architecture(AutoConfig.from_pretrained(directory).to_dict())
    mesh = lay_out(Layout(tp=1, pp=1, cp=1, dp=1, sequence_parallel=False), seed=1)
    return Policy(config, architecture, source=directory, mesh=mesh)


def lay_out_batch(batch: Batch, *, sequence_multiple: int, row_multiple: int = 1) -> list[PackedRow]:
    """Plan the batch's rows and lay them out: packed with a multiple of 1, padded with that of the longest."""
    plan = plan_rows(
        batch.lengths,
        config=SequencePackingConfig(),
        window=None,
        capacity=batch.capacity,
        sequence_multiple=sequence_multiple,
        row_multiple=row_multiple,
        dp_size=1,
    )
    random = np.random.default_rng(0)
    prompts, completions = (
        Ragged.from_lengths(random.integers(2, batch.vocab_size, lengths.sum()).astype(np.int32), lengths)
        for lengths in (batch.prompts, batch.completions)
    )
    advantages = random.normal(size=len(batch.lengths))
    return [
        lay_out_row(
            RowSequences(
                prompts=prompts.take(row),
                completions=completions.take(row),
                sampled_logprobs=np.full(batch.completions[row].sum(), -4.0, np.float32),
                advantages=advantages[row],
                coefficients=1 / batch.completions[row],
            ),
            sequence_multiple=sequence_multiple,
            row_multiple=row_multiple,
            cp_size=1,
            cp_rank=0,
        )
        for row in plan.rows[0]
    ]


def train(policy: Policy, rows: list[PackedRow]) -> TrainStats:
    """One optimizer step."""
    loss = PolicyLoss(LossConfig(reference_policy_kl_penalty=0.0))
    return policy.update(rows, loss=loss, denominator=DENOMINATOR, temperature=1.0)


def compare(directory: Path, batch: Batch, *, turns: int, profiled: bool) -> Comparison:
    """Time a batch both ways."""
    policy = make_policy(directory)
    longest = int(batch.lengths.max())
    two = np.array([2])
    (bare_row,) = lay_out_batch(replace(batch, prompts=two, completions=two), sequence_multiple=1)
    actions = [
        lambda: train(policy, lay_out_batch(batch, sequence_multiple=1)),
        lambda: train(policy, lay_out_batch(batch, sequence_multiple=longest)),
        lambda: train(policy, [bare_row]),
        lambda: train(policy, [bare_row] * 9),
    ]
    *seconds, one_bare, nine_bare = interleaved_medians(actions, turns=turns)
    sides = []
    for multiple, action, spent in zip((1, longest), actions, seconds, strict=False):
        rows = lay_out_batch(batch, sequence_multiple=multiple)
        tokens = sum(len(row.token_ids) for row in rows)
        fixed = one_bare + (len(rows) - 1) * (nine_bare - one_bare) / 8
        sides.append(Side(len(rows), tokens, int(batch.lengths.sum()) / tokens, spent, fixed))
        if profiled:
            print_profile(action)
    packed, padded = sides
    return Comparison(
        batch=batch.name,
        num_parameters=sum(parameter.numel() for parameter in policy.own_parameters()),
        num_sequences=len(batch.lengths),
        capacity=batch.capacity,
        longest=longest,
        packed=packed,
        padded=padded,
        token_ratio=padded.trained_tokens / packed.trained_tokens,
        time_ratio=padded.seconds / packed.seconds,
        rest_ratio=(padded.seconds - padded.fixed_seconds) / (packed.seconds - packed.fixed_seconds),
    )


def print_profile(action: Callable[[], object]) -> None:
    """Print where the processor time of an action goes, by torch's operators."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        action()
    print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


@contextmanager
def model_and_batch(name: str, options: argparse.Namespace) -> Iterator[tuple[Path, Batch]]:
    """A model's directory and a batch for it: the quickstart's, or one of SIZES, whose directory goes at the end.

    options: ``model`` the quickstart's directory; ``sequences`` and ``max_response`` of a random batch.
    """
    if name == "quickstart":
        yield options.model, quickstart_batch(options.model)
        return
    with tempfile.TemporaryDirectory() as directory:
        make_random_model(Path(directory), name)
        batch = random_batch(name, num_sequences=options.sequences, max_response=options.max_response, capacity=2048)
        yield Path(directory), batch


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="the quickstart's, with its data (tools/make_tiny_model.py)")
    parser.add_argument(
        "--turns", type=int, default=3, help="of the 30M model's steps; the quickstart's are ten times as many"
    )
    parser.add_argument("--sequences", type=int, default=32, help="of the 30M model's batch")
    parser.add_argument("--max-response", type=int, default=512, help="of the 30M model's batch, tokens")
    parser.add_argument("--profile", action="store_true", help="print where the processor time of a step goes")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    device.set_num_threads()
    device.start_process_group()
    results = []
    for name, turns in (("quickstart", 10 * options.turns), ("30M", options.turns)):
        with model_and_batch(name, options) as (directory, batch):
            results.append(compare(directory, batch, turns=turns, profiled=options.profile))
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    print("| model | sequences | longest | layout | rows | tokens | density | ms a step | of it fixed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for result in results:
        for name, side in (("packed", result.packed), ("padded", result.padded)):
            print(
                f"| {result.batch} ({result.num_parameters:,}) | {result.num_sequences} | {result.longest} | {name}"
                f" | {side.num_rows} | {side.trained_tokens} | {side.density:.3f} | {1e3 * side.seconds:.1f}"
                f" | {1e3 * side.fixed_seconds:.1f} |"
            )
    for result in results:
        print(
            f"{result.batch}: padded over packed, tokens {result.token_ratio:.2f}, time {result.time_ratio:.2f},"
            f" without what is fixed {result.rest_ratio:.2f}"
        )


if __name__ == "__main__":
    main()
