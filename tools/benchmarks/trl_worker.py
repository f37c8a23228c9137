"""TRL's side of against_trl.py; runs in TRL's environment."""

from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from tools.benchmarks.grpo_task import GENERATIONS, Ledger, parse_task, reward


class Watch(TrainerCallback):
    """Tells the ledger of steps; the clock starts with the first."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Start the clock."""
        self.ledger.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Note the step."""
        self.ledger.step_is_done(state.global_step, rest["model"])


def main() -> None:
    """Train and write the validations."""
    task, output = parse_task(__doc__)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    ledger = Ledger(task, tokenizer)

    def rewards(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **rest: Any
    ) -> list[float]:
        ledger.sampled += sum(len(ids) for ids in completion_ids)
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        return [reward(c, a, ended=e) for e, c, a in zip(ended, completions, answer, strict=True)]

    optimizer = task.optimizer(model)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(
            output_dir=str(output.parent / "trl"),
            per_device_train_batch_size=task.prompts * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=task.new_tokens,
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="grpo",
            max_grad_norm=1.0,
            max_steps=task.steps,
            save_strategy="no",
            report_to="none",
            logging_steps=1000,
            disable_tqdm=True,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=task.seed,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": row["input"], "answer": row["output"]} for row in task.rows("train")]
        ),
        processing_class=tokenizer,
        callbacks=[Watch(ledger)],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, task.schedule)),
    )
    trainer.train()
    ledger.write(output)


if __name__ == "__main__":
    main()
