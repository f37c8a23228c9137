"""The files of a Hugging Face export: which tensors go where, and their index."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dppo_megatron.architecture import Architecture
from dppo_megatron.atomic_file import atomic_write_text
from dppo_megatron.parallel.hf_fusion import hf_shapes
from dppo_megatron.parallel.hf_names import Parameter
from dppo_megatron.parallel.safetensors_file import TensorEntry

SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class HfFile:
    """A safetensors file of an export: its name and the tensors in it, in the table's order."""

    name: str
    entries: tuple[TensorEntry, ...]


def plan_files(
    table: Sequence[Parameter], dtypes: Sequence[torch.dtype], architecture: Architecture, *, shard_bytes: int
) -> tuple[HfFile, ...]:
    """Share the model's tensors out over files of at most ``shard_bytes`` each; a larger tensor has its own.

    dtypes: of each parameter of the table.
    """
    shards: list[list[TensorEntry]] = []
    filled = 0
    for parameter, dtype in zip(table, dtypes, strict=True):
        for name, shape in zip(parameter.hf_names, hf_shapes(parameter, architecture), strict=True):
            entry = TensorEntry(name, shape, dtype)
            if not shards or filled + entry.num_bytes > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(entry)
            filled += entry.num_bytes
    if len(shards) == 1:
        return (HfFile("model.safetensors", tuple(shards[0])),)
    return tuple(
        HfFile(f"model-{number:05d}-of-{len(shards):05d}.safetensors", tuple(shard))
        for number, shard in enumerate(shards, 1)
    )


def write_index(directory: Path, files: Sequence[HfFile]) -> None:
    """Write the index of a model of several files; one file needs none."""
    if len(files) == 1:
        return
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(entry.num_bytes for file in files for entry in file.entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    atomic_write_text(directory / "model.safetensors.index.json", json.dumps(index, indent=2))
