"""Write a policy as a Hugging Face directory that transformers and vLLM load at once."""

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from dppo_megatron.atomic_file import atomic_write_text
from dppo_megatron.model_source import copy_companions, read_model_config
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.hf_files import SHARD_BYTES, plan_files, write_index
from dppo_megatron.parallel.hf_names import model_parameters
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.parallel.safetensors_file import write_safetensors


def save_hf(policy: Policy, directory: Path) -> None:
    """Write weights in safetensors files, beside the source model's config and tokenizer files.

    Called by every rank; the first writes, one tensor at a time. The directory appears whole or not at all; one
    that is there is replaced. config.json's type becomes that of the weights.
    """
    stream = _without_tied_copy(policy)
    if policy.mesh.world.is_first:
        architecture, dtype = policy.architecture, policy.model_config.params_dtype
        table = model_parameters(architecture, tp=1)
        files = plan_files(table, [dtype] * len(table), architecture, shard_bytes=SHARD_BYTES)
        pending = directory.with_name(f".{directory.name}.incomplete")
        shutil.rmtree(pending, ignore_errors=True)
        pending.mkdir(parents=True)
        for file in files:
            write_safetensors(pending / file.name, file.entries, islice(stream, len(file.entries)))
        write_index(pending, files)
        copy_companions(policy.source, pending)
        _set_dtype(pending, dtype)
        shutil.rmtree(directory, ignore_errors=True)
        pending.replace(directory)
    for _ in stream:  # to its end on every rank: it is made of collectives
        pass
    collectives.barrier(policy.mesh.world)


def _without_tied_copy(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    tied = policy.architecture.tied
    return ((name, tensor) for name, tensor in policy.hf_weights() if not (tied and name == "lm_head.weight"))


def _set_dtype(directory: Path, dtype: torch.dtype) -> None:
    config, name = dict(read_model_config(directory)), str(dtype).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config.get(key) != name:
        # transformers loads weights in the type that config.json states: it would round them.
        atomic_write_text(directory / "config.json", json.dumps(config | {key: name}, indent=2) + "\n")
