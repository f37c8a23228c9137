"""megatron-core's layout-free torch_dist checkpoint, read by regions and written tensor by tensor.

No process group and no model is needed: the format is torch.distributed.checkpoint's, a file of saved tensors and
a metadata file that says where the chunks of each one lie. Keys are megatron-core's: layers are stacked along a
leading dimension, and the norm before a projection goes by the projection's name.
"""

import io
import json
import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dppo_megatron.architecture import Architecture
from dppo_megatron.parallel.hf_fusion import pad_vocabulary
from dppo_megatron.parallel.hf_names import Fusion, Parameter
from dppo_megatron.parallel.safetensors_file import FileRecord, HashingFile

METADATA_FILE = ".metadata"
_CHUNK_BYTES = 16 * 2**20
"""Small enough that the allocator uses memory again instead of asking the system for new pages each time."""
_NORMS = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
_EMPTY_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


def checkpoint_key(parameter: Parameter) -> str:
    """The key of a parameter's tensor, in which the layers are stacked.

    Source: megatron.core ``TransformerBlock.sharded_state_dict`` and the key maps of its layer specs.
    """
    if parameter.layer is None:
        return parameter.name
    name = parameter.name.removeprefix(f"decoder.layers.{parameter.layer}.")
    module, kind = name.rsplit(".", 1)
    if module in _NORMS:
        return f"decoder.layers.{_NORMS[module]}.layer_norm_{kind}"
    return f"decoder.layers.{name}"


class _RegionPlanner(DefaultLoadPlanner):
    """Lets torch's reader copy into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._target
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: the reader has copied into the target."""


class TorchDistFiles:
    """A source of weights in a torch_dist directory, such as a run's checkpoint; any layout wrote it.

    Raises ValueError when the directory is not one.
    """

    tp = 1
    """Its tensors are whole."""

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self.directory, self.architecture = directory, architecture
        self._reader = FileSystemReader(directory)
        try:
            self._metadata: Metadata = self._reader.read_metadata()
        except (pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"policy.model_name: {directory / METADATA_FILE} is damaged: {error}") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        used = {info.relative_path for info in (self._metadata.storage_data or {}).values()}
        if missing := sorted(name for name in used if not (directory / name).is_file()):
            raise ValueError(f"policy.model_name: {directory} lacks {', '.join(missing)}")

    def _entry(self, parameter: Parameter) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(checkpoint_key(parameter))
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"policy.model_name: {self.directory} holds no tensor {checkpoint_key(parameter)!r}")
        return entry

    def check(self, table: Sequence[Parameter]) -> None:
        """Compare keys and shapes with the model's table; optimizer state and empty states are no weights."""
        for parameter in table:
            size, expected = tuple(self._entry(parameter).size), stacked_shape(parameter, self.architecture)
            if parameter.fusion is Fusion.VOCABULARY:
                # Padded for another tensor parallelism, perhaps.
                same = size[1:] == expected[1:] and size[0] >= self.architecture.vocab_size
            else:
                same = size == expected
            if not same:
                raise ValueError(
                    f"policy.model_name: {checkpoint_key(parameter)} in {self.directory} has shape {size}; "
                    f"config.json gives {expected}"
                )
        known = {checkpoint_key(parameter) for parameter in table}
        unknown = [
            key
            for key, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and key not in known and not key.startswith("optimizer.")
        ]
        if unknown:
            raise ValueError(
                f"policy.model_name: {self.directory} holds tensors of no known place: "
                f"{', '.join(sorted(unknown)[:5])}"
            )

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The type of a parameter's tensor as stored."""
        return self._entry(parameter).properties.dtype

    def shard(self, parameter: Parameter, *, tp: int, rank: int) -> Tensor:
        """Read the shard ``rank`` of ``tp``; of the files, only the chunks that overlap it."""
        shape, dim = list(parameter.shape), parameter.tp_dim
        if parameter.fusion is Fusion.GATE_UP:
            half = shape[0] // 2
            size = half // tp
            local = [size, *shape[1:]]
            starts = (rank * size, half + rank * size)
            return torch.cat([self._region(parameter, [start] + [0] * (len(shape) - 1), local) for start in starts])
        offsets = [0] * len(shape)
        if dim is not None:
            shape[dim] //= tp
            offsets[dim] = rank * shape[dim]
        if parameter.fusion is not Fusion.VOCABULARY:
            return self._region(parameter, offsets, shape)
        rows = max(min(shape[0], self.architecture.vocab_size - offsets[0]), 0)
        return pad_vocabulary(self._region(parameter, offsets, [rows, *shape[1:]]), shape[0])

    def _region(self, parameter: Parameter, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        entry, target = self._entry(parameter), torch.empty(*sizes, dtype=self.dtype(parameter))
        if target.numel() == 0:
            return target
        if parameter.layer is not None:
            offsets, sizes = [parameter.layer, *offsets], [1, *sizes]
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(checkpoint_key(parameter), entry, [wanted])
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise ValueError(
                f"policy.model_name: {self.directory} holds no value for a part of {checkpoint_key(parameter)}"
            )
        self._reader.read_data(LoadPlan(items), _RegionPlanner(target.view(*sizes)))
        return target


def stacked_shape(parameter: Parameter, architecture: Architecture) -> tuple[int, ...]:
    """Shape of the tensor that holds a parameter of every layer."""
    return parameter.shape if parameter.layer is None else (architecture.num_layers, *parameter.shape)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a part of a stacked tensor lies: ``length`` bytes from ``begin`` in ``file``."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A written file and the chunks in it."""

    record: FileRecord
    chunks: tuple[Chunk, ...]


def write_chunks(path: Path, tensors: Iterable[tuple[Parameter, Tensor]]) -> ChunkFile:
    """Write whole parameters into one file, in chunks of rows; they are taken one by one."""
    chunks = []
    # Through memory, because torch.save hides a disk's error behind its own; the same memory for all.
    buffer = io.BytesIO()
    with HashingFile(path) as file:
        for parameter, tensor in tensors:
            lead = () if parameter.layer is None else (parameter.layer,)
            rest = (0,) * (tensor.dim() - 1)
            num_rows = max(_CHUNK_BYTES * len(tensor) // (tensor.numel() * tensor.element_size()), 1)
            for start in range(0, len(tensor), num_rows):
                block, begin = tensor[start : start + num_rows], file.num_bytes
                if len(block) < len(tensor):
                    block = block.clone()  # saving a view would save all of its storage
                block = block.view(*(1 for _ in lead), *block.shape)
                buffer.seek(0)
                torch.save(block, buffer)
                length = buffer.tell()
                with buffer.getbuffer() as memory, memory[:length] as written:
                    file.write(written)
                offsets = (*lead, start, *rest)
                chunks.append(Chunk(checkpoint_key(parameter), offsets, tuple(block.shape), path.name, begin, length))
    return ChunkFile(file.record(), tuple(chunks))


def write_metadata(
    directory: Path,
    chunks: Sequence[Chunk],
    *,
    table: Sequence[Parameter],
    dtypes: Sequence[torch.dtype],
    architecture: Architecture,
) -> None:
    """Write what turns files of chunks into a checkpoint that megatron-core loads; the last step of writing one.

    dtypes: of each parameter of the table.
    """
    entries: dict[str, Any] = {}
    for parameter, dtype in zip(table, dtypes, strict=True):
        entries[checkpoint_key(parameter)] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(stacked_shape(parameter, architecture)),
            chunks=[],
        )
    places: dict[MetadataIndex, _StorageInfo] = {}
    for chunk in chunks:
        offsets = torch.Size(chunk.offsets)
        entries[chunk.key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
        places[MetadataIndex(chunk.key, offsets)] = _StorageInfo(chunk.file, chunk.begin, chunk.length)
    _write_empty_states(directory / "empty_states.distcp", entries, places, architecture.num_layers)
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backends |= {"common_backend": "torch", "common_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(backends), encoding="utf-8")
    torch.save({}, directory / "common.pt")
    with (directory / METADATA_FILE).open("wb") as file:
        pickle.dump(Metadata(entries, storage_data=places), file)


def _write_empty_states(path: Path, entries: dict[str, Any], places: dict[Any, Any], num_layers: int) -> None:
    # megatron-core's linear layers have an extra state, empty without FP8, and its loading demands that it is there.
    buffer = io.BytesIO()
    torch.save([None], buffer)
    length = buffer.tell()
    path.write_bytes(buffer.getvalue())
    for module in _EMPTY_STATES:
        for layer in range(num_layers):
            key = f"decoder.layers.{module}._extra_state/shard_{layer}_{num_layers}"
            entries[key] = BytesStorageMetadata()
            places[MetadataIndex(key)] = _StorageInfo(path.name, 0, length)
