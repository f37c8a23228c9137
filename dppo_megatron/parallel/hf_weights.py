"""Hugging Face weights in and out of a sharded policy: loaded slice by slice, streamed out in buckets."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dppo_megatron import device
from dppo_megatron.architecture import Architecture
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.hf_names import Fusion, Parameter, model_parameters, table_name
from dppo_megatron.parallel.mesh import Mesh


class HfDirectory:
    """The tensors of a local Hugging Face directory, readable by slices without loading a file whole.

    Raises ValueError when the directory or its weights are missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files = json.loads(index.read_text())["weight_map"]
        elif (directory / "model.safetensors").is_file():
            with safe_open(directory / "model.safetensors", "pt") as handle:
                files = dict.fromkeys(handle.keys(), "model.safetensors")
        else:
            raise ValueError(
                f"policy.model_name: {directory} holds no model.safetensors and no model.safetensors.index.json"
            )
        self._files: Mapping[str, str] = files
        self._handles: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def slice(self, name: str) -> Any:
        """A lazily read tensor: index it to read just that part."""
        if name not in self._files:
            raise ValueError(f"policy.model_name: {self.directory} holds no tensor {name!r}")
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(self.directory / file, "pt")
        return self._handles[file].get_slice(name)


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Where the whole model's parameters live: the table, each one's stage, and this stage's own tensors.

    local: by name in the whole model, the tensors of this pipeline stage.
    """

    architecture: Architecture
    table: tuple[Parameter, ...]
    stage_of: tuple[int, ...]
    local: Mapping[str, Tensor]


def locate_parameters(
    chunk: torch.nn.Module, architecture: Architecture, *, mesh: Mesh, stages: tuple[tuple[int, ...], ...]
) -> StageParameters:
    """Match the table with the parameters of this rank's model chunk.

    A tied model's output layer on the last of several stages is a copy of the embedding that megatron-core keeps
    equal; it is in ``local`` under its own name, and in no stream. RuntimeError where table and model differ.
    """
    table = model_parameters(architecture, tp=mesh.tp.size)
    stage_of_layer = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    first_layer = stages[mesh.pp.rank][0] if stages[mesh.pp.rank] else 0
    local = {_global_name(name, first_layer): parameter.data for name, parameter in chunk.named_parameters()}
    stage_of = []
    for parameter in table:
        in_embedding = parameter.name.startswith("embedding.")
        last_or_first = 0 if in_embedding else mesh.pp.size - 1
        stage_of.append(last_or_first if parameter.layer is None else stage_of_layer[parameter.layer])
    expected = {p.name for p, stage in zip(table, stage_of, strict=True) if stage == mesh.pp.rank}
    copies = {"output_layer.weight"} if architecture.tied else set()
    if expected != set(local) - copies:
        raise RuntimeError(f"the model's parameters are not the table's: {sorted(expected ^ set(local))}")
    return StageParameters(architecture, table, tuple(stage_of), local)


def _global_name(name: str, first_layer: int) -> str:
    name, prefix = table_name(name), "decoder.layers."
    if not name.startswith(prefix):
        return name
    layer, rest = name.removeprefix(prefix).split(".", 1)
    return f"{prefix}{int(layer) + first_layer}.{rest}"


def load_weights(parameters: StageParameters, source: HfDirectory, *, mesh: Mesh) -> None:
    """Read this rank's shard of every parameter of its stage, and nothing else.

    Raises ValueError for a tensor that is missing, left over or of a wrong shape.
    """
    known = {name for parameter in parameters.table for name in parameter.hf_names} | {"lm_head.weight"}
    if unknown := sorted(source.names - known):
        raise ValueError(f"policy.model_name: {source.directory} holds tensors of no known place: {unknown[:5]}")
    for parameter in parameters.table:
        if parameter.name in parameters.local:
            _load(parameter, parameters.local[parameter.name], source, parameters.architecture, mesh)
    if parameters.architecture.tied and "output_layer.weight" in parameters.local:
        embedding = parameters.table[0]
        _load(embedding, parameters.local["output_layer.weight"], source, parameters.architecture, mesh)


def _load(parameter: Parameter, target: Tensor, source: HfDirectory, architecture: Architecture, mesh: Mesh) -> None:
    slices = [source.slice(name) for name in parameter.hf_names]
    tp, rank = mesh.tp.size, mesh.tp.rank
    if parameter.fusion is Fusion.VOCABULARY:
        rows = parameter.shape[0] // tp
        shard = slices[0][rank * rows : (rank + 1) * rows]
        shard = torch.nn.functional.pad(shard, (0, 0, 0, rows - len(shard)))
    elif parameter.fusion is Fusion.GATE_UP:
        rows = parameter.shape[0] // 2 // tp
        shard = torch.cat([part[rank * rows : (rank + 1) * rows] for part in slices])
    elif parameter.fusion is Fusion.QKV:
        shard = _qkv_shard(slices, architecture, tp, rank)
    elif parameter.tp_dim is None:
        shard = slices[0][:]
    else:
        size = parameter.shape[parameter.tp_dim] // tp
        part = slice(rank * size, (rank + 1) * size)
        shard = slices[0][part] if parameter.tp_dim == 0 else slices[0][:, part]
    if tuple(shard.shape) != tuple(target.shape):
        raise ValueError(
            f"policy.model_name: {', '.join(parameter.hf_names)} give a shard of shape {tuple(shard.shape)}, "
            f"the model's {parameter.name} has {tuple(target.shape)}"
        )
    target.copy_(shard)


def _qkv_shard(slices: list[Any], architecture: Architecture, tp: int, rank: int) -> Tensor:
    groups, head_dim = architecture.num_key_value_heads, architecture.head_dim
    per_group = architecture.num_attention_heads // groups
    if groups % tp:
        # A shard ends within a group: read whole groups and cut.
        full = _fuse_qkv(*(part[:] for part in slices), groups=groups, head_dim=head_dim)
        return full.chunk(tp)[rank]
    mine = groups // tp
    sizes = (mine * per_group * head_dim, mine * head_dim, mine * head_dim)
    query, key, value = (part[rank * size : (rank + 1) * size] for part, size in zip(slices, sizes, strict=True))
    return _fuse_qkv(query, key, value, groups=mine, head_dim=head_dim)


def _fuse_qkv(query: Tensor, key: Tensor, value: Tensor, *, groups: int, head_dim: int) -> Tensor:
    hidden = query.size(1)
    parts = [part.reshape(groups, -1, head_dim, hidden) for part in (query, key, value)]
    return torch.cat(parts, 1).reshape(-1, hidden)


def stream_weights(parameters: StageParameters, *, mesh: Mesh, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, on every rank: the same names in the same order.

    Called by every rank of the world. Parameters travel in flattened buckets of at most ``bucket_bytes`` a rank
    (one parameter may exceed it): one all-gather over TP and one broadcast over PP each. At most one gathered
    bucket exists at a time; without TP and PP the tensors are views of the parameters: copy, do not keep.
    """
    for bucket in _buckets(parameters, mesh.tp.size, bucket_bytes):
        stage = parameters.stage_of[bucket[0]]
        rows = [parameters.table[number] for number in bucket]
        sizes = [_numel(row.local_shape(mesh.tp.size)) for row in rows]
        if mesh.tp.size == mesh.pp.size == 1:
            shards = [parameters.local[row.name].flatten()[None] for row in rows]
        else:
            shards = list(_gather_bucket(parameters, rows, sum(sizes), stage, mesh).split(sizes, 1))
        for row, shard in zip(rows, shards, strict=True):
            local = shard.view(mesh.tp.size, *row.local_shape(mesh.tp.size))
            yield from _to_hugging_face(row, local, parameters.architecture)
    if parameters.architecture.tied:
        # vLLM on CPUs keeps a packed copy of a tied output layer: it must be told as well.
        yield from stream_embedding(parameters, mesh=mesh)


def stream_embedding(parameters: StageParameters, *, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Yield the embedding once more, under the name of the output layer that is tied to it."""
    row, shape = parameters.table[0], parameters.table[0].local_shape(mesh.tp.size)
    if mesh.tp.size == mesh.pp.size == 1:
        local = parameters.local[row.name][None]
    else:
        local = _gather_bucket(parameters, [row], _numel(shape), 0, mesh).view(mesh.tp.size, *shape)
    for _, tensor in _to_hugging_face(row, local, parameters.architecture):
        yield "lm_head.weight", tensor


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _buckets(parameters: StageParameters, tp: int, bucket_bytes: int) -> Iterator[list[int]]:
    # A bucket holds parameters of one stage, in the table's order, on every rank the same.
    itemsize = next(iter(parameters.local.values())).element_size()
    bucket, filled = [], 0
    for number, parameter in enumerate(parameters.table):
        size = _numel(parameter.local_shape(tp)) * itemsize
        other_stage = bucket and parameters.stage_of[bucket[0]] != parameters.stage_of[number]
        if bucket and (other_stage or filled + size > bucket_bytes):
            yield bucket
            bucket, filled = [], 0
        bucket.append(number)
        filled += size
    yield bucket


def _gather_bucket(parameters: StageParameters, rows: list[Parameter], size: int, stage: int, mesh: Mesh) -> Tensor:
    # [TP, size] on every rank: gathered over TP within the stage that owns it, then sent along PP.
    example = next(iter(parameters.local.values()))
    if mesh.pp.rank == stage:
        flat = torch.cat([parameters.local[row.name].flatten() for row in rows])
        gathered = collectives.gather_shards(flat, mesh.tp)
    else:
        gathered = torch.empty(mesh.tp.size, size, dtype=example.dtype, device=device.current())
    return collectives.broadcast(gathered.contiguous(), mesh.pp, source=stage)


def _to_hugging_face(
    parameter: Parameter, shards: Tensor, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Undo sharding and fusion; shards: [TP, *local shape]."""
    names = parameter.hf_names
    if parameter.fusion is Fusion.QKV:
        groups, head_dim = architecture.num_key_value_heads, architecture.head_dim
        per_group = architecture.num_attention_heads // groups
        fused = shards.reshape(groups, per_group + 2, head_dim, -1)
        for name, part in zip(names, fused.split([per_group, 1, 1], 1), strict=True):
            yield name, part.reshape(-1, architecture.hidden_size)
    elif parameter.fusion is Fusion.GATE_UP:
        for name, part in zip(names, shards.chunk(2, 1), strict=True):
            yield name, part.reshape(-1, architecture.hidden_size)
    elif parameter.fusion is Fusion.VOCABULARY:
        yield names[0], shards.flatten(0, 1)[: architecture.vocab_size]
    elif parameter.tp_dim is None:
        yield names[0], shards[0]
    else:
        yield names[0], torch.cat(shards.unbind(0), parameter.tp_dim)
