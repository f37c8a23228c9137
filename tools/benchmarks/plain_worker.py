"""The plain loop of against_trl.py: GRPO as one writes it with Hugging Face's model and torch, without a framework.

Prompts go through the model once, their cache is repeated for the completions, and sampling ends when all have
ended. Training pads on the right, where causal attention needs no mask.
"""

import random

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.benchmarks.grpo_task import GENERATIONS, Ledger, Task, parse_task, reward


@torch.no_grad()
def sample(model: torch.nn.Module, prompts: list[Tensor], *, new_tokens: int, eos: int) -> list[Tensor]:
    """Completions of each prompt in turn, GENERATIONS of it, each with the end that it sampled, if it did."""
    longest = max(map(len, prompts))
    padded = torch.stack([torch.cat([prompt.new_zeros(longest - len(prompt)), prompt]) for prompt in prompts])
    real = torch.stack([torch.arange(longest) >= longest - len(prompt) for prompt in prompts]).long()
    positions = (real.cumsum(1) - 1).clamp(min=0)
    out = model(padded, attention_mask=real, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache = out.past_key_values
    cache.batch_repeat_interleave(GENERATIONS)
    logits, real, positions = (
        part.repeat_interleave(GENERATIONS, 0) for part in (out.logits[:, -1], real, positions[:, -1:])
    )
    columns, ended = [], torch.zeros(len(logits), dtype=torch.bool)
    for _ in range(new_tokens):
        tokens = torch.multinomial(logits.softmax(-1), 1)
        columns.append(tokens)
        ended |= tokens[:, 0] == eos
        if ended.all() or len(columns) == new_tokens:
            break
        real, positions = torch.cat([real, torch.ones_like(tokens)], 1), positions + 1
        out = model(tokens, attention_mask=real, position_ids=positions, past_key_values=cache, use_cache=True)
        logits = out.logits[:, -1]
    rows = torch.cat(columns, 1)
    lengths = torch.where(ended, (rows == eos).long().argmax(1) + 1, rows.shape[1]).tolist()
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def loss_of(model: torch.nn.Module, prompts: list[Tensor], completions: list[Tensor], advantages: Tensor) -> Tensor:
    """The clipped surrogate, mean over sequences of the mean over tokens; the first and only update of a batch."""
    sequences = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
    tokens = pad_sequence(sequences, batch_first=True)
    starts = torch.tensor([len(prompt) for prompt in prompts])[:, None] - 1
    lengths = torch.tensor([len(completion) for completion in completions])[:, None]
    places = torch.arange(tokens.shape[1] - 1)
    trained = (places >= starts) & (places < starts + lengths)
    logits = model(tokens[:, :-1], use_cache=False).logits
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    ratio = (chosen - chosen.detach()).exp()
    terms = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return ((terms * trained).sum(1) / lengths[:, 0]).mean()


def train(task: Task, model: torch.nn.Module, ledger: Ledger) -> None:
    """All steps."""
    tokenizer, eos = ledger.tokenizer, ledger.tokenizer.eos_token_id
    rows, stream = task.rows("train"), random.Random(task.seed)
    encoded = [torch.tensor(tokenizer.encode(row["input"])) for row in rows]
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, task.schedule)
    ledger.start()
    for step in range(task.steps):
        chosen = stream.sample(range(len(rows)), task.prompts)
        completions = sample(model, [encoded[row] for row in chosen], new_tokens=task.new_tokens, eos=eos)
        ledger.sampled += sum(map(len, completions))
        ended = [int(completion[-1]) == eos for completion in completions]
        texts = tokenizer.batch_decode(
            [completion[: len(completion) - end] for completion, end in zip(completions, ended, strict=True)]
        )
        repeated = [row for row in chosen for _ in range(GENERATIONS)]
        rewards = torch.tensor(
            [
                reward(text, rows[row]["output"], ended=end)
                for text, row, end in zip(texts, repeated, ended, strict=True)
            ]
        ).view(-1, GENERATIONS)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
        optimizer.zero_grad()
        loss_of(model, [encoded[row] for row in repeated], completions, advantages.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        ledger.step_is_done(step + 1, model)


def main() -> None:
    """Train and write the validations."""
    task, output = parse_task(__doc__)
    torch.set_num_threads(1)
    torch.manual_seed(task.seed)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    ledger = Ledger(task, AutoTokenizer.from_pretrained(task.model))
    train(task, model, ledger)
    ledger.write(output)


if __name__ == "__main__":
    main()
