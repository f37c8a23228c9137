"""Write a policy as a Hugging Face directory that transformers and vLLM load at once."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.policy import Policy

_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "*.jinja",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
)
_SHARD_BYTES = 4 * 2**30


def save_hf(policy: Policy, directory: Path) -> None:
    """Write weights in safetensors shards, beside the source model's config and tokenizer files.

    Called by every rank; the first writes. The directory appears whole or not at all; one that is there is replaced.
    """
    writer = (
        _ShardWriter(directory.with_name(f".{directory.name}.incomplete")) if policy.mesh.world.is_first else None
    )
    for name, tensor in policy.hf_weights():
        tied_copy = name == "lm_head.weight" and policy.architecture.tied
        if writer is not None and not tied_copy:
            writer.add(name, tensor)
    if writer is not None:
        writer.finish(policy.source)
        shutil.rmtree(directory, ignore_errors=True)
        writer.directory.replace(directory)
    collectives.barrier(policy.mesh.world)


class _ShardWriter:
    """Collects tensors on the host and writes a file whenever a shard is full."""

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self.directory = directory
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > _SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor.to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        save_file(self._pending, self._shard_path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _shard_path(self, number: int) -> Path:
        return self.directory / f"shard-{number}.safetensors"

    def finish(self, source: Path) -> None:
        """Write what is pending, give shards their final names, add the companions of the source model."""
        self._flush()
        if len(self._shards) == 1:
            self._shard_path(0).rename(self.directory / "model.safetensors")
        else:
            weight_map = {}
            for number, names in enumerate(self._shards):
                file = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
                self._shard_path(number).rename(self.directory / file)
                weight_map |= dict.fromkeys(names, file)
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for pattern in _COMPANIONS:
            for file in source.glob(pattern):
                shutil.copy2(file, self.directory / file.name)
