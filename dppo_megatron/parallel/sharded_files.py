"""Checkpoints cut for one layout: a safetensors file a rank, under megatron-core's own names.

``layout.json`` says for which layout. A file holds what ``load_state_dict`` of that rank's model chunk takes, layers
counted from 0 in each chunk; a tied model's last chunk holds its copy of the embedding as ``output_layer.weight``.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dppo_megatron.architecture import Architecture
from dppo_megatron.parallel.hf_fusion import fused_shard, to_hugging_face
from dppo_megatron.parallel.hf_names import Parameter, model_parameters

LAYOUT_FILE = "layout.json"


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """Tensor, pipeline and virtual pipeline parallelism of a sharded checkpoint; layers are shared out evenly."""

    tp: int = 1
    pp: int = 1
    virtual_pp: int = 1

    def check(self, architecture: Architecture) -> None:
        """Raise ValueError naming the size that does not divide."""
        for name in ("tp", "pp", "virtual_pp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}; it must be at least 1")
        if self.virtual_pp > 1 and self.pp == 1:
            raise ValueError(f"virtual_pp: {self.virtual_pp} needs pp of at least 2")
        chunks = self.pp * self.virtual_pp
        if architecture.num_layers % chunks:
            raise ValueError(f"pp x virtual_pp: {chunks} does not divide {architecture.num_layers} layers")
        sizes = {
            "num_attention_heads": architecture.num_attention_heads,
            "num_key_value_heads": architecture.num_key_value_heads,
            "intermediate_size": architecture.ffn_hidden_size,
        }
        for name, size in sizes.items():
            if size % self.tp:
                raise ValueError(f"tp: {self.tp} does not divide {name} = {size}")

    def chunk_of(self, parameter: Parameter, num_layers: int) -> tuple[int, int]:
        """Pipeline stage and virtual stage that hold a parameter.

        Source: megatron.core ``get_transformer_layer_offset``: chunks go round the stages.
        """
        if parameter.layer is None:
            first = parameter.name.startswith("embedding.")
            return (0, 0) if first else (self.pp - 1, self.virtual_pp - 1)
        chunk = parameter.layer // (num_layers // (self.pp * self.virtual_pp))
        return chunk % self.pp, chunk // self.pp

    def file_name(self, tp_rank: int, stage: int, virtual_stage: int) -> str:
        """The file of one rank's chunk."""
        suffix = f"_virtual{virtual_stage}" if self.virtual_pp > 1 else ""
        return f"tp{tp_rank}_pp{stage}{suffix}.safetensors"

    def local_name(self, parameter: Parameter, num_layers: int) -> str:
        """The parameter's name within its chunk."""
        if parameter.layer is None:
            return parameter.name
        per_chunk = num_layers // (self.pp * self.virtual_pp)
        rest = parameter.name.removeprefix(f"decoder.layers.{parameter.layer}.")
        return f"decoder.layers.{parameter.layer % per_chunk}.{rest}"

    def write(self, directory: Path) -> None:
        """Leave ``layout.json``: it makes the directory a checkpoint."""
        (directory / LAYOUT_FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")


class ShardedFiles:
    """A source of weights in a checkpoint that was cut for one layout; any other can be read from it.

    Raises ValueError when a file is missing or damaged.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self.directory, self.architecture = directory, architecture
        try:
            self.layout = TargetLayout(**json.loads((directory / LAYOUT_FILE).read_text(encoding="utf-8")))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"policy.model_name: {directory / LAYOUT_FILE} is damaged: {error}") from error
        self.layout.check(architecture)
        self.tp = self.layout.tp
        self._table = {parameter.name: parameter for parameter in model_parameters(architecture, tp=self.tp)}
        self._handles: dict[str, Any] = {}

    def _open(self, parameter: Parameter, tp_rank: int) -> tuple[Any, str]:
        num_layers = self.architecture.num_layers
        file = self.layout.file_name(tp_rank, *self.layout.chunk_of(parameter, num_layers))
        if file not in self._handles:
            if not (self.directory / file).is_file():
                raise ValueError(f"policy.model_name: {self.directory} lacks {file}")
            try:
                self._handles[file] = safe_open(self.directory / file, "pt")
            except SafetensorError as error:
                raise ValueError(f"policy.model_name: {self.directory / file} is damaged: {error}") from error
        handle, name = self._handles[file], self.layout.local_name(parameter, num_layers)
        if name not in handle.keys():  # noqa: SIM118  (not a dictionary)
            raise ValueError(f"policy.model_name: {self.directory / file} holds no tensor {name!r}")
        return handle, name

    def check(self, table: Sequence[Parameter]) -> None:
        """Compare every rank's file with the model's table; reads headers only."""
        for parameter in self._table.values():
            for rank in range(self.tp):
                handle, name = self._open(parameter, rank)
                found = tuple(handle.get_slice(name).get_shape())
                if found != parameter.local_shape(self.tp):
                    raise ValueError(
                        f"policy.model_name: {name} in {self.directory} has shape {found}; "
                        f"config.json gives {parameter.local_shape(self.tp)}"
                    )

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The type of a parameter's tensors as stored."""
        handle, name = self._open(parameter, 0)
        return handle.get_slice(name)[:0].dtype

    def shard(self, parameter: Parameter, *, tp: int, rank: int) -> Tensor:
        """Read the shard ``rank`` of ``tp``: one tensor where it was cut so, else all of the parameter."""
        if tp == self.tp:
            handle, name = self._open(parameter, rank)
            return handle.get_tensor(name)
        stored = self._table[parameter.name]
        shards = torch.stack([self.shard(stored, tp=self.tp, rank=other) for other in range(self.tp)])
        whole = [tensor for _, tensor in to_hugging_face(stored, shards, self.architecture)]
        return fused_shard(parameter, whole, self.architecture, tp=tp, rank=rank)
