"""Check on one GPU what no CPU can: Transformer Engine's layers and FP8 against plain torch, and a short run.

python -m tools.gpu_check [--keep DIRECTORY]

Prints a table: a row a check, with the largest difference that is accepted, or why the check was left out. Exit code
0: all that ran is in order; 1: a difference is too large or a check broke; 77: no GPU, nothing was checked.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import PackedRow
from dppo_megatron.config.fp8 import Fp8Config
from dppo_megatron.config.schema import (
    DistributedDataParallelConfig,
    LossConfig,
    MegatronConfig,
    OptimizerConfig,
    PolicyConfig,
    SchedulerConfig,
)
from dppo_megatron.parallel.mesh import open_mesh
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.plan import Layout
from dppo_megatron.rl.loss import PolicyLoss
from tools.benchmarks.packed_training import Batch, lay_out_batch

EXIT_NO_GPU = 77
NUM_UPDATES = 5
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.yaml"
RECIPES: tuple[tuple[Literal["delayed", "tensorwise", "blockwise", "mxfp8"], Literal["e4m3", "hybrid"]], ...] = (
    ("delayed", "hybrid"),
    ("tensorwise", "hybrid"),
    ("blockwise", "e4m3"),
    ("mxfp8", "e4m3"),
)
BFLOAT16_LIMIT, FP8_LIMIT, REHEARSAL_LIMIT = 0.05, 0.5, 0.25
"""Relative differences of gradients that are accepted: rounding of bfloat16; of FP8; of FP8 against its rehearsal.
Guesses, made before any of it has run on a GPU: large enough for rounding, small enough for a wrong name or scale."""


@dataclass(frozen=True)
class Sizes:
    """A random Qwen3 and the rows it is compared on."""

    hidden_size: int = 512
    num_layers: int = 4
    num_sequences: int = 64
    capacity: int = 2048


@dataclass(frozen=True)
class Arm:
    """One way to build the policy. local: layers of plain torch; rehearsed: FP8 emulated on them."""

    precision: Literal["float32", "bfloat16"] = "bfloat16"
    local: bool = False
    fp8: Fp8Config | None = None
    rehearsed: bool = False


@dataclass(frozen=True)
class Measured:
    """What a policy says of the rows: log-probs of all labels, gradients by Hugging Face name.

    likelihood: mean log-prob of the labels after NUM_UPDATES updates; the surrogate itself is a constant on policy.
    """

    logprobs: Tensor
    likelihood: float
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Of one arm from another. gradients: norm of the difference over the other's norm."""

    mean_logprob: float
    largest_logprob: float
    likelihood: float
    gradients: float

    def __str__(self) -> str:
        return (
            f"log-probs {self.mean_logprob:.1e} (mean) {self.largest_logprob:.1e} (max), gradients "
            f"{self.gradients:.1e}, likelihood after {NUM_UPDATES} updates {self.likelihood:.1e}"
        )


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    check: str
    result: Literal["ok", "FAILED", "skipped"]
    detail: str
    seconds: float = 0.0


def make_model(directory: Path, sizes: Sizes) -> None:
    """Write the random Qwen3."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=sizes.hidden_size,
        intermediate_size=2 * sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.hidden_size // 32,
        num_key_value_heads=sizes.hidden_size // 64,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(directory)


def make_rows(sizes: Sizes) -> list[PackedRow]:
    """Rows of sequences made up, padded so that every recipe takes them."""
    random = np.random.default_rng(0)
    prompts, completions = (random.integers(4, limit, sizes.num_sequences) for limit in (64, 192))
    batch = Batch("check", prompts, completions, capacity=sizes.capacity, vocab_size=1024)
    return lay_out_batch(batch, sequence_multiple=1, row_multiple=128)


def measure(model: Path, rows: list[PackedRow], arm: Arm) -> Measured:
    """Build the policy of an arm and let it say its log-probs, then, after a pass to warm up, its gradients."""
    megatron = MegatronConfig(
        pipeline_dtype=arm.precision,
        fp8_cfg=arm.fp8 or Fp8Config(),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=0.0, clip_grad=1.0, use_distributed_optimizer=False),
        scheduler=SchedulerConfig(
            lr_warmup_iters=0, lr_warmup_init=0.0, start_weight_decay=0.0, end_weight_decay=0.0
        ),
        distributed_data_parallel_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False
        ),
    )
    config = PolicyConfig(model_name=str(model), precision=arm.precision, megatron_cfg=megatron)
    architecture = read_architecture(AutoConfig.from_pretrained(model).to_dict())
    loss = PolicyLoss(LossConfig(reference_policy_kl_penalty=0.0))
    plain = mock.patch.object(device, "has_transformer_engine", return_value=False)
    layout = Layout(tp=1, pp=1, cp=1, dp=1, sequence_parallel=False)
    with open_mesh(layout, seed=1) as mesh, plain if arm.local else contextlib.nullcontext():
        policy = Policy(config, architecture, source=model, mesh=mesh, rehearse_fp8=arm.rehearsed)
        gradients: dict[str, Tensor] = {}
        for _ in range(2):  # delayed scaling knows its scales after the first
            named = policy.gradients(rows, loss=loss, denominator=100.0, temperature=1.0)
            gradients = {name: tensor.float().cpu().clone() for name, tensor in named}
        logprobs = torch.cat([one.cpu() for one in policy.logprobs(rows, temperature=1.0)])
        for _ in range(NUM_UPDATES):
            policy.update(rows, loss=loss, denominator=100.0, temperature=1.0)
        after = torch.cat([one.cpu() for one in policy.logprobs(rows, temperature=1.0)])
    return Measured(logprobs, float(after.mean()), gradients)


def difference(mine: Measured, other: Measured) -> Difference:
    """How far one is from the other."""
    assert mine.gradients.keys() == other.gradients.keys()
    apart = sum(float((mine.gradients[name] - one).square().sum()) for name, one in other.gradients.items())
    whole = sum(float(one.square().sum()) for one in other.gradients.values())
    logprobs = (mine.logprobs - other.logprobs).abs()
    return Difference(
        float(logprobs.mean()), float(logprobs.max()), abs(mine.likelihood - other.likelihood), (apart / whole) ** 0.5
    )


def judge(check: str, compare: Callable[[], Difference], *, limit: float) -> Row:
    """Run one comparison and hold its gradients against the limit; what it raises is its result."""
    start = time.perf_counter()
    try:
        found = compare()
    except (RuntimeError, ValueError, AssertionError) as error:
        return Row(check, "FAILED", f"{type(error).__name__}: {error}"[:300], time.perf_counter() - start)
    result = "ok" if found.gradients <= limit else "FAILED"
    return Row(check, result, f"{found} (limit {limit})", time.perf_counter() - start)


def why_not(recipe: str) -> str | None:
    """Why the device cannot run a recipe, in Transformer Engine's words; None where it can."""
    if not device.has_transformer_engine():
        return "Transformer Engine's compiled module is not installed (pip install transformer-engine[pytorch])"
    from transformer_engine.pytorch import quantization  # pyright: ignore[reportMissingImports]

    available = {"blockwise": quantization.is_fp8_block_scaling_available, "mxfp8": quantization.is_mxfp8_available}
    able, reason = available.get(recipe, quantization.is_fp8_available)(return_reason=True)
    return None if able else str(reason)


def compare_layers(model: Path, rows: list[PackedRow], *, why_not: Callable[[str], str | None]) -> Iterator[Row]:
    """Plain torch against Transformer Engine, then each recipe against bfloat16 and against its rehearsal."""
    local = measure(model, rows, Arm(local=True))
    missing = None if device.has_transformer_engine() else why_not("delayed")
    if missing:
        yield Row("layers of plain torch / Transformer Engine, bfloat16", "skipped", missing)
    else:
        yield judge(
            "layers of plain torch / Transformer Engine, bfloat16",
            lambda: difference(measure(model, rows, Arm()), local),
            limit=BFLOAT16_LIMIT,
        )
    for recipe, kind in RECIPES:
        fp8 = Fp8Config(enabled=True, fp8=kind, fp8_recipe=recipe)
        rehearsal = measure(model, rows, Arm(local=True, fp8=fp8, rehearsed=True))
        check = f"FP8 {recipe} {kind}"
        yield judge(f"{check}, rehearsed / bfloat16", lambda: difference(rehearsal, local), limit=FP8_LIMIT)  # noqa: B023
        if reason := why_not(recipe):
            yield Row(f"{check} / rehearsed", "skipped", reason)
            continue
        yield judge(
            f"{check} / rehearsed",
            lambda: difference(measure(model, rows, Arm(fp8=fp8)), rehearsal),  # noqa: B023
            limit=REHEARSAL_LIMIT,
        )


def run_quickstart(directory: Path, *, num_steps: int, timeout_seconds: float = 150.0) -> Row:
    """Make the quickstart's model and train it for some steps, as a user would."""
    check, start = f"quickstart, {num_steps} steps", time.perf_counter()
    root, model, log = Path(__file__).parents[1], directory / "tiny-sort", directory / "run"
    overrides = (f"logger.log_dir={log}", f"grpo.max_num_steps={num_steps}", "checkpointing.enabled=false")
    commands = (
        [sys.executable, "-m", "tools.make_tiny_model", str(model)],
        [sys.executable, "-m", "dppo_megatron", "train", str(QUICKSTART), f"policy.model_name={model}", *overrides],
    )
    said = ""
    for command in commands:
        try:
            ended = subprocess.run(
                command, cwd=root, capture_output=True, text=True, timeout=timeout_seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return Row(check, "FAILED", f"took longer than {timeout_seconds:.0f} s", timeout_seconds)
        if ended.returncode:
            tail = " ".join((ended.stdout + ended.stderr).split())[-300:]
            return Row(check, "FAILED", f"exit code {ended.returncode}: {tail}", time.perf_counter() - start)
        said = ended.stdout
    accuracy = next((line for line in said.splitlines() if line.startswith("accuracy  ")), "no accuracy was told")
    return Row(check, "ok", " ".join(accuracy.split()), time.perf_counter() - start)


def table(rows: list[Row]) -> str:
    """The rows under each other, aligned."""
    width = max(len(row.check) for row in rows)
    return "\n".join(f"{row.check:<{width}}  {row.result:<7}  {row.seconds:5.1f} s  {row.detail}" for row in rows)


def exit_code(rows: list[Row]) -> int:
    """1 where a check failed, else 0."""
    return int(any(row.result == "FAILED" for row in rows))


def main() -> int:
    """Run all checks; see the head of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, help="directory for the models and the run, kept afterwards")
    options = parser.parse_args()
    if not device.has_gpu():
        print("no GPU: torch.cuda.is_available() is false here, so nothing was checked")
        return EXIT_NO_GPU
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.keep or Path(scratch)
        sizes = Sizes()
        make_model(directory / "random", sizes)
        rows = list(compare_layers(directory / "random", make_rows(sizes), why_not=why_not))
        rows.append(run_quickstart(directory, num_steps=30))
    print(f"{device.names()[0]}, torch {torch.__version__}\n{table(rows)}")
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
