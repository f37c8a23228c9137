"""Rollout tokens a second: the embedded engine against Hugging Face generate, same model, prompts and batch.

python tools/benchmarks/rollout.py models/tiny-sort [--parameters 30M] [--new-tokens 64]

One thread, turns taken in one process. Completions of a model without an end of sequence all run to the limit, so
both sides sample the same number of tokens. Processor seconds are compared: they bear a busy machine better.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dppo_megatron.batches import PromptBatch, Ragged, Sampling
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.generator import EmbeddedGenerator

SIZES = {"100k": (64, 2, 192), "2M": (192, 4, 576), "30M": (512, 10, 1536)}  # hidden, layers, intermediate
PROMPTS, GENERATIONS = 32, 8


def make_config(size: str, *, vocab_size: int) -> Qwen3Config:
    """A Qwen3 of about that many parameters, embeddings left out."""
    hidden, layers, intermediate = SIZES[size]
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    )


def processor_seconds(work: Callable[[], object], *, turns: int) -> list[float]:
    """Of each turn, after one to warm up."""
    spent = []
    for turn in range(turns + 1):
        start = time.process_time()
        work()
        if turn:
            spent.append(time.process_time() - start)
    return spent


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="for its tokenizer and prompts")
    parser.add_argument("--parameters", choices=list(SIZES), default="2M")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    config = make_config(options.parameters, vocab_size=len(tokenizer))
    model = Qwen3ForCausalLM(config).eval()
    stream = np.random.default_rng(0)
    rows = [stream.integers(3, len(tokenizer), size=stream.integers(4, 17)).tolist() for _ in range(PROMPTS)]
    prompts = PromptBatch(
        prompt_ids=np.arange(PROMPTS),
        occurrences=np.zeros(PROMPTS, np.int64),
        minibatches=np.zeros(PROMPTS, np.int64),
        tokens=Ragged.from_rows(rows),
        texts=("",) * PROMPTS,
        answers=("",) * PROMPTS,
        weights=np.ones(PROMPTS),
        num_candidates=np.array([PROMPTS]),
    )
    engine = EmbeddedGenerator(config, dtype=torch.float32, device=torch.device("cpu"), max_cache_tokens=1 << 20)
    engine.load_weights(model.state_dict().items(), version=0)
    never = (len(tokenizer) + 1,)  # no such token: every completion has the same length
    sampling = Sampling(GENERATIONS, 1.0, options.new_tokens, never)
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows for _ in range(GENERATIONS)])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows for _ in range(GENERATIONS)])

    @torch.no_grad()
    def generate() -> None:
        arguments = {"attention_mask": mask, "do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
        sampled = model.generate(padded, max_new_tokens=options.new_tokens, **arguments)  # pyright: ignore
        assert sampled.shape[1] == longest + options.new_tokens

    steps = iter(range(1000))
    theirs = processor_seconds(generate, turns=options.turns)
    ours = processor_seconds(lambda: engine.generate(prompts, Draws(0, next(steps)), sampling), turns=options.turns)
    tokens = PROMPTS * GENERATIONS * options.new_tokens
    rates = [tokens / statistics.median(spent) for spent in (theirs, ours)]
    print(
        f"{options.parameters}, {tokens:,} tokens a turn: generate {rates[0]:,.0f} tokens a processor second, ",
        end="",
    )
    print(f"embedded {rates[1]:,.0f}, ratio {rates[1] / rates[0]:.2f}x (with log-probs, and one stream a request)")


if __name__ == "__main__":
    main()
