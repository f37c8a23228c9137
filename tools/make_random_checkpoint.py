"""Make a Qwen3 checkpoint of real size with random values, to measure conversion; it has no tokenizer.

python tools/make_random_checkpoint.py models/random-8b --size 8b
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from dppo_megatron.architecture import Architecture, read_architecture
from dppo_megatron.parallel.hf_files import HfFile, plan_files, write_index
from dppo_megatron.parallel.hf_names import model_parameters
from dppo_megatron.parallel.safetensors_file import write_safetensors
from dppo_megatron.progress_bar import progress_bar

SIZES = {"8b": (36, 4096, 32, 8, 12288, 151936), "100m": (12, 512, 8, 4, 1536, 65536)}
"""Layers, hidden size, heads, key-value heads, feed-forward size, vocabulary; 100m is 0.2 GB in bfloat16."""


def make_random_checkpoint(directory: Path, *, size: str, shard_bytes: int) -> int:
    """Write config.json and bfloat16 weights; returns their bytes. Raises ValueError where the directory exists."""
    if directory.exists():
        raise ValueError(f"{directory} exists; remove it or name another")
    layers, hidden, heads, groups, ffn, vocabulary = SIZES[size]
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 128,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    architecture = read_architecture(config)
    files = _plan(architecture, shard_bytes)
    directory.mkdir(parents=True)
    total = sum(entry.num_bytes for file in files for entry in file.entries)
    done = 0
    with progress_bar("make") as progress:
        for file in files:
            record = write_safetensors(directory / file.name, file.entries, _random_tensors(file))
            done += record.num_bytes
            progress(done, total)
    write_index(directory, files)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return total


def _plan(architecture: Architecture, shard_bytes: int) -> tuple[HfFile, ...]:
    table = model_parameters(architecture, tp=1)
    return plan_files(table, [torch.bfloat16] * len(table), architecture, shard_bytes=shard_bytes)


def _random_tensors(file: HfFile) -> Iterator[tuple[str, Tensor]]:
    # Any bits whose exponent is that of a number near 1: drawn ten times as fast as normal values.
    stream = torch.Generator().manual_seed(len(file.entries))
    pool = torch.randint(0x3F00, 0x3F80, (2**24,), dtype=torch.int16, generator=stream)
    for number, entry in enumerate(file.entries):
        count = torch.Size(entry.shape).numel()
        values = torch.empty(count, dtype=torch.int16)
        for start in range(0, count, len(pool)):
            block = values[start : start + len(pool)]
            block.copy_(pool.roll(number + start // len(pool))[: len(block)])
        yield entry.name, values.view(torch.bfloat16).view(entry.shape)


def main() -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--shard-mb", type=int, default=4096)
    options = parser.parse_args()
    try:
        make_random_checkpoint(options.directory, size=options.size, shard_bytes=options.shard_mb * 2**20)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
