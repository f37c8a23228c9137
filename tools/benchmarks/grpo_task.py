"""What the trainers of against_trl.py have in common: the task, its reward and schedule, and who keeps the time."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

GENERATIONS, WARM_UP_STEPS = 8, 3


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
    """A run. prompts: a step. validation: problems, at the end and every ``period`` steps. peak_rate: of learning."""

    model: Path
    steps: int
    seed: int
    prompts: int
    validation: int
    period: int
    peak_rate: float

    def rows(self, split: str) -> list[dict[str, str]]:
        """Problems: ``input`` and ``output`` each."""
        return [json.loads(line) for line in (self.model / "data" / f"{split}.jsonl").read_text().splitlines()]

    @property
    def new_tokens(self) -> int:
        """Of the longest right answer and its end: a character is a token."""
        return 1 + max(len(row["output"]) for row in self.rows("train"))

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return max(len(row["input"]) for split in ("train", "validation") for row in self.rows(split))

    def schedule(self, step: int) -> float:
        """The learning rate as a share of its peak: up from 0.3 of it, then linearly to zero, as the quickstart's."""
        if step < WARM_UP_STEPS:
            return 0.3 + 0.7 * step / WARM_UP_STEPS
        return max(0.0, (self.steps - step) / max(self.steps - WARM_UP_STEPS, 1))

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The quickstart's."""
        return torch.optim.AdamW(model.parameters(), lr=self.peak_rate, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)


def reward(completion: str, answer: str, *, ended: bool) -> float:
    """Of a completion without its end: 1 if it is the answer and ended by itself."""
    return float(ended and completion == answer)


def parse_task(description: str | None) -> tuple[Task, Path]:
    """A worker's command line: the task, and the file for its validations."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("task", type=json.loads, help="a Task, as JSON")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    return Task(**{**options.task, "model": Path(options.task["model"])}), options.output


def arguments(task: Task, output: Path) -> list[str]:
    """The command line that ``parse_task`` reads."""
    return [json.dumps({**asdict(task), "model": str(task.model)}), str(output)]


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
        if step % self.task.period == 0 or step == self.task.steps:
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
