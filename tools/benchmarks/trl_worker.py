"""TRL's side of against_trl.py; runs in TRL's environment.

The task, batch, generations, optimizer and schedule of examples/quickstart.yaml.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

PROMPTS, GENERATIONS, NEW_TOKENS, PERIOD = 32, 8, 9, 25


def rows(path: Path) -> list[dict[str, str]]:
    """Lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


class Watch(TrainerCallback):
    """Validates every PERIOD steps, outside of the times it keeps."""

    def __init__(self, tokenizer: Any, held_out: list[dict[str, str]]) -> None:
        self.tokenizer, self.held_out = tokenizer, held_out
        self.seconds = self.processor = 0.0
        self.sampled = 0
        self.points: list[dict[str, float]] = []
        self._start()

    def _start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The clock starts with the first step."""
        self._start()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Stop the clock, validate where it is due, start it again."""
        self.seconds += time.perf_counter() - self._wall
        self.processor += time.process_time() - self._cpu
        if state.global_step % PERIOD == 0:
            self.points.append(
                {
                    "step": state.global_step,
                    "accuracy": self.accuracy(rest["model"]),
                    "seconds": self.seconds,
                    "processor_seconds": self.processor,
                    "sampled_tokens": self.sampled,
                    "trained_tokens": self.sampled,
                }
            )
        self._start()

    @torch.no_grad()
    def accuracy(self, model: Any) -> float:
        """At temperature 1, four samples of each held-out problem: exact, and ended by itself."""
        prompts = [row["input"] for row in self.held_out for _ in range(4)]
        answers = [row["output"] for row in self.held_out for _ in range(4)]
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        batch.pop("token_type_ids", None)
        sampled = model.generate(**batch, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW_TOKENS)
        texts = self.tokenizer.batch_decode(sampled[:, batch["input_ids"].shape[1] :])
        eos, pad = self.tokenizer.eos_token, self.tokenizer.pad_token
        right = [text.replace(pad, "") == answer + eos for text, answer in zip(texts, answers, strict=True)]
        return sum(right) / len(right)


def main() -> None:
    """Train and write the validations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    train = rows(options.model / "data" / "train.jsonl")
    watch = Watch(tokenizer, rows(options.model / "data" / "validation.jsonl")[:256])

    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **rest: Any
    ) -> list[float]:
        watch.sampled += sum(len(ids) for ids in completion_ids)
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        return [float(e and c == a) for e, c, a in zip(ended, completions, answer, strict=True)]

    def learning_rate(step: int) -> float:
        # Three steps of warm-up from 0.3 of the peak, then linearly to zero, as the quickstart has it.
        return 0.3 + 0.7 * step / 3 if step < 3 else max(0.0, (options.steps - step) / (options.steps - 3))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(options.output.parent / "trl"),
            per_device_train_batch_size=PROMPTS * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=NEW_TOKENS,
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="grpo",
            max_grad_norm=1.0,
            max_steps=options.steps,
            save_strategy="no",
            report_to="none",
            logging_steps=1000,
            disable_tqdm=True,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=options.seed,
        ),
        train_dataset=Dataset.from_list([{"prompt": row["input"], "answer": row["output"]} for row in train]),
        processing_class=tokenizer,
        callbacks=[watch],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)),
    )
    trainer.train()
    options.output.write_text(json.dumps(watch.points))


if __name__ == "__main__":
    main()
