"""Hugging Face weights in and out of a sharded policy: loaded slice by slice, streamed out in buckets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dppo_megatron import device
from dppo_megatron.architecture import Architecture
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.hf_fusion import to_hugging_face
from dppo_megatron.parallel.hf_names import Parameter, model_parameters, table_name
from dppo_megatron.parallel.mesh import Mesh
from dppo_megatron.parallel.weight_source import WeightSource


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
    chunks: Sequence[torch.nn.Module],
    architecture: Architecture,
    *,
    mesh: Mesh,
    stages: tuple[tuple[tuple[int, ...], ...], ...],
) -> StageParameters:
    """Match the table with the parameters of this rank's model chunks; stages: the layers of all ranks' chunks.

    A tied model's output layer on the last of several stages is a copy of the embedding that megatron-core keeps
    equal; it is in ``local`` under its own name, and in no stream. RuntimeError where table and model differ.
    """
    table = model_parameters(architecture, tp=mesh.tp.size)
    stage_of_layer = {layer: stage for stage, parts in enumerate(stages) for layers in parts for layer in layers}
    local = {
        _global_name(name, layers[0]): parameter.data
        for chunk, layers in zip(chunks, stages[mesh.pp.rank], strict=True)
        for name, parameter in chunk.named_parameters()
    }
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


def load_weights(parameters: StageParameters, source: WeightSource, *, mesh: Mesh) -> None:
    """Read this rank's shard of every parameter of its stage, and nothing else.

    Raises ValueError for a tensor that is missing, left over or of a wrong shape or type.
    """
    source.check(parameters.table)
    for parameter in parameters.table:
        if parameter.name in parameters.local:
            _load(parameter, parameters.local[parameter.name], source, mesh)
    if parameters.architecture.tied and "output_layer.weight" in parameters.local:
        _load(parameters.table[0], parameters.local["output_layer.weight"], source, mesh)


def _load(parameter: Parameter, target: Tensor, source: WeightSource, mesh: Mesh) -> None:
    shard = source.shard(parameter, tp=mesh.tp.size, rank=mesh.tp.rank)
    assert shard.shape == target.shape, parameter.name
    target.copy_(shard)


def stream_weights(parameters: StageParameters, *, mesh: Mesh, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, whole, on every rank: the same names in the same order.

    Called by every rank of the world. Parameters travel in flattened buckets of at most ``bucket_bytes`` a rank
    (one parameter may exceed it): one all-gather over TP and one broadcast over PP each. At most one gathered
    bucket exists at a time; without TP and PP the tensors are views of the parameters: copy, do not keep.
    """
    for bucket in buckets(parameters, mesh.tp.size, bucket_bytes):
        stage = parameters.stage_of[bucket[0]]
        rows = [parameters.table[number] for number in bucket]
        sizes = [_numel(row.local_shape(mesh.tp.size)) for row in rows]
        if mesh.tp.size == mesh.pp.size == 1:
            shards = [parameters.local[row.name].flatten()[None] for row in rows]
        else:
            shards = list(_gather_bucket(parameters, rows, sum(sizes), stage, mesh).split(sizes, 1))
        for row, shard in zip(rows, shards, strict=True):
            local = shard.view(mesh.tp.size, *row.local_shape(mesh.tp.size))
            yield from to_hugging_face(row, local, parameters.architecture)
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
    for _, tensor in to_hugging_face(row, local, parameters.architecture):
        yield "lm_head.weight", tensor


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def buckets(parameters: StageParameters, tp: int, bucket_bytes: int) -> Iterator[list[int]]:
    """Numbers of the table's parameters, in its order: one stage a bucket, the same buckets on every rank."""
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
