"""Make the tiny Qwen3 of the quickstart: a model that sorts digits, sometimes, and its data.

The warm start imitates a mixture of behaviours, 35 % of them right, so that sampling is right now and then:
reinforcement learning sharpens a mode that is there quickly, and learns a new skill slowly.
"""

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, EOS_ID = 0, 1
CHARACTERS = "0123456789=+-*() ?:,.abcdefghijklmnopqrstuvwxyz!\"'#%&/;<>[]_|"  # with the above: 64 entries
MIN_DIGITS, MAX_DIGITS = 3, 8
NUM_WARM_START, NUM_TRAIN, NUM_VALIDATION = 8000, 2000, 256
RIGHT_FRACTION = 0.35
BATCH_SIZE, WARM_UP_STEPS = 64, 50
FILES = ("config.json", "model.safetensors", "tokenizer.json", "data/train.jsonl", "data/validation.jsonl")


@dataclass(frozen=True, slots=True)
class Size:
    """A model's shape, and the peak learning rate of its warm start."""

    hidden: int
    layers: int
    heads: int
    head_dim: int
    learning_rate: float


SIZES = {"100k": Size(64, 2, 4, 16, 4e-3), "30M": Size(512, 10, 8, 64, 1e-3)}


@dataclass(frozen=True, slots=True)
class Problem:
    """Digits to sort: the prompt ``70412=`` and its answer ``01247``."""

    prompt: str
    answer: str


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer: one character a token, no token added to a prompt."""
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, UNKNOWN, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, size: str, head_dim: int | None, max_digits: int
) -> Qwen3ForCausalLM:
    """Build the untrained model, with as many embeddings as the tokenizer has entries.

    size: of SIZES. head_dim: None for that of the size.
    """
    shape = SIZES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=2,
        head_dim=head_dim or shape.head_dim,
        intermediate_size=3 * shape.hidden,
        max_position_embeddings=max(256, 2 * max_digits + 2),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def make_problems(stream: random.Random, *, count: int, max_digits: int) -> list[Problem]:
    """Draw distinct problems of 3 to ``max_digits`` digits."""
    digits: set[str] = set()
    problems: list[Problem] = []
    while len(problems) < count:
        question = "".join(stream.choices("0123456789", k=stream.randint(MIN_DIGITS, max_digits)))
        if question not in digits:
            digits.add(question)
            problems.append(Problem(f"{question}=", "".join(sorted(question))))
    return problems


def _imitated(problem: Problem, stream: random.Random) -> Problem:
    """The problem with the answer to imitate: right, else the digits reversed or in falling order."""
    if stream.random() < RIGHT_FRACTION:
        return problem
    return Problem(problem.prompt, (problem.prompt[-2::-1], problem.answer[::-1])[stream.randrange(2)])


def _encode(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids and labels, int64 [N, T]; labels are -100 on the prompt and on the padding at the right."""
    width = max(len(problem.prompt) + len(problem.answer) for problem in problems) + 1
    tokens = torch.full((len(problems), width), PAD_ID)
    labels = torch.full_like(tokens, -100)
    for row, problem in enumerate(problems):
        ids = torch.tensor(tokenizer.encode(f"{problem.prompt}{problem.answer}{EOS}"))
        tokens[row, : len(ids)] = ids
        labels[row, len(problem.prompt) : len(ids)] = ids[len(problem.prompt) :]
    return tokens, labels


def warm_start(
    model: Qwen3ForCausalLM,
    *,
    tokens: Tensor,
    labels: Tensor,
    steps: int,
    learning_rate: float,
    stream: random.Random,
) -> None:
    """Train the model on encoded problems, next-token cross entropy, and print a line every 50 steps or 20 s."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    started = told = time.perf_counter()
    for step in range(steps):
        rate = learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.02, 1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = torch.tensor(stream.choices(range(len(tokens)), k=BATCH_SIZE))
        # Padding stands at the right and attention is causal: no mask is needed.
        logits = model(input_ids=tokens[rows, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[rows, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now = time.perf_counter()
        if (step + 1) % 50 == 0 or now - told > 20:
            told = now
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {now - started:.0f} s", flush=True)


@torch.no_grad()
def exact_accuracy(model: Qwen3ForCausalLM, *, tokens: Tensor, labels: Tensor) -> float:
    """Mean probability that sampling at temperature 1 gives the encoded answer and then stops."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.double()
    losses = functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    return torch.exp(-losses.sum(1)).mean().item()


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Seed torch and use one thread (sums depend on their number), and put both back."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _write_problems(path: Path, problems: Sequence[Problem]) -> None:
    rows = [json.dumps({"input": problem.prompt, "output": problem.answer}) for problem in problems]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def is_complete(output: Path) -> bool:
    """Whether the directory holds all that this tool writes."""
    return all((output / name).is_file() for name in FILES)


def make_tiny_model(
    output: Path,
    *,
    seed: int,
    steps: int,
    size: str = "100k",
    head_dim: int | None = None,
    max_digits: int = MAX_DIGITS,
) -> float:
    """Write the model, its tokenizer and its data to a new directory, which appears only when complete.

    Returns the exact accuracy at temperature 1 on the validation problems. Deterministic for a seed.

    Raises: ValueError where ``output`` exists and is not an empty directory.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"output: {output} exists and is not an empty directory; remove it or name another")
    stream = random.Random(seed)
    problems = make_problems(stream, count=NUM_WARM_START + NUM_VALIDATION, max_digits=max_digits)
    seen, held_out = problems[:NUM_WARM_START], problems[NUM_WARM_START:]
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        with _reproducible(seed):
            tokenizer = make_tokenizer()
            model = make_model(tokenizer, size=size, head_dim=head_dim, max_digits=max_digits)
            tokens, labels = _encode([_imitated(problem, stream) for problem in seen], tokenizer)
            rate = SIZES[size].learning_rate
            warm_start(model, tokens=tokens, labels=labels, steps=steps, learning_rate=rate, stream=stream)
            tokens, labels = _encode(held_out, tokenizer)
            accuracy = exact_accuracy(model, tokens=tokens, labels=labels)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "data").mkdir()
        _write_problems(unfinished / "data" / "train.jsonl", seen[:NUM_TRAIN])
        _write_problems(unfinished / "data" / "validation.jsonl", held_out)
        unfinished.chmod(0o755)  # mkdtemp makes it private
        os.replace(unfinished, output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return accuracy


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="steps of the warm start")
    parser.add_argument("--size", choices=list(SIZES), default="100k", help="parameters, about")
    parser.add_argument("--head-dim", type=int, help="size of an attention head; vLLM on a CPU needs 32 at least")
    parser.add_argument("--max-digits", type=int, default=MAX_DIGITS, help="of the longest list")
    arguments = parser.parse_args()
    if is_complete(arguments.output):
        print(f"{arguments.output} is already complete: nothing to do")
        return
    transformers_logging.disable_progress_bar()
    accuracy = make_tiny_model(
        arguments.output,
        seed=arguments.seed,
        steps=arguments.steps,
        size=arguments.size,
        head_dim=arguments.head_dim,
        max_digits=arguments.max_digits,
    )
    print(f"{arguments.output}: right {accuracy:.3f} of the time at temperature 1 on held-out problems")


if __name__ == "__main__":
    main()
