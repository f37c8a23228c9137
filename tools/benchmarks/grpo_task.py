"""What the trainers of against_trl.py have in common: the task, its reward and schedule, and who keeps the time."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

GENERATIONS, PEAK_RATE, WARM_UP_STEPS, PERIOD = 8, 1e-3, 3, 25


@dataclass(frozen=True, slots=True)
class Point:
    """A validation and what was spent until then. tokens: completion tokens sampled, and trained on."""

    step: int
    accuracy: float
    seconds: float
    processor_seconds: float
    sampled_tokens: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Task:
    """A run. prompts: a step. new_tokens: of the longest right answer and its end. validation: problems."""

    model: Path
    steps: int
    seed: int
    prompts: int
    validation: int
    partial_credit: bool

    @property
    def period(self) -> int:
        """Steps between validations; the last one is always validated."""
        return min(PERIOD, self.steps)

    def rows(self, split: str) -> list[dict[str, str]]:
        """Problems: ``input`` and ``output`` each."""
        return [json.loads(line) for line in (self.model / "data" / f"{split}.jsonl").read_text().splitlines()]

    @property
    def new_tokens(self) -> int:
        """A character is a token."""
        return 1 + max(len(row["output"]) for row in self.rows("train"))

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return max(len(row["input"]) for split in ("train", "validation") for row in self.rows(split))

    def reward(self, completion: str, answer: str, *, ended: bool) -> float:
        """Of a completion without its end: exact and ended by itself, or the share of right characters."""
        return score("", completion, answer) if self.partial_credit else float(ended and completion == answer)

    def learning_rate(self, step: int) -> float:
        """As a share of the peak: warm-up from 0.3 of it, then linearly to zero, as the quickstart has it."""
        if step < WARM_UP_STEPS:
            return 0.3 + 0.7 * step / WARM_UP_STEPS
        return max(0.0, (self.steps - step) / max(self.steps - WARM_UP_STEPS, 1))

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The quickstart's."""
        return torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


def score(prompt: str, completion: str, answer: str) -> float:
    """The share of characters in their right places: a reward that even a model without training earns."""
    right = sum(mine == theirs for mine, theirs in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))


def parse_task(description: str | None) -> tuple[Task, Path]:
    """A worker's command line: the task, and the file for its validations."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    for name in ("steps", "seed", "prompts", "validation"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--partial-credit", action="store_true")
    values = vars(parser.parse_args())
    output = values.pop("output")
    return Task(**values), output


def arguments(task: Task, output: Path) -> list[str]:
    """The command line that ``parse_task`` reads."""
    numbers = ("steps", "seed", "prompts", "validation")
    flags = [part for name in numbers for part in (f"--{name}", str(getattr(task, name)))]
    return [str(task.model), str(output), *flags, *(["--partial-credit"] if task.partial_credit else [])]


class Ledger:
    """Keeps a trainer's times and validates it, outside of them."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.held_out = task.rows("validation")[: task.validation]
        self.seconds = self.processor = 0.0
        self.sampled = 0
        self.points: list[Point] = []
        self.start()

    def start(self) -> None:
        """Let the clocks run."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step_is_done(self, step: int, model: Any) -> None:
        """Stop the clocks after so many steps, validate where it is due, start them again."""
        self.seconds += time.perf_counter() - self._wall
        self.processor += time.process_time() - self._cpu
        if step % self.task.period == 0:
            accuracy = self.accuracy(model)
            self.points.append(Point(step, accuracy, self.seconds, self.processor, self.sampled, self.sampled))
        self.start()

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        """At temperature 1, four samples of each held-out problem: exact, and ended by itself."""
        prompts = [row["input"] for row in self.held_out for _ in range(4)]
        answers = [row["output"] for row in self.held_out for _ in range(4)]
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        batch.pop("token_type_ids", None)
        limit = self.task.new_tokens
        sampled = model.generate(**batch, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=limit)
        texts = self.tokenizer.batch_decode(sampled[:, batch["input_ids"].shape[1] :])
        eos, pad = self.tokenizer.eos_token, self.tokenizer.pad_token
        right = [text.replace(pad, "") == answer + eos for text, answer in zip(texts, answers, strict=True)]
        return sum(right) / len(right)

    def write(self, output: Path) -> None:
        """The validations, as JSON."""
        output.write_text(json.dumps([asdict(point) for point in self.points]))


def read_points(lines: Sequence[dict[str, Any]]) -> tuple[Point, ...]:
    """What ``Ledger.write`` wrote."""
    return tuple(Point(**line) for line in lines)
