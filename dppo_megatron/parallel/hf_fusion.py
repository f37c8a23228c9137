"""Between Hugging Face tensors and megatron-core's shards: pure, the same for training, export and conversion."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dppo_megatron.architecture import Architecture
from dppo_megatron.parallel.hf_names import Fusion, Parameter


def hf_shapes(parameter: Parameter, architecture: Architecture) -> tuple[tuple[int, ...], ...]:
    """Shapes of the Hugging Face tensors that make up a parameter, in the order of their names."""
    rest = parameter.shape[1:]
    if parameter.fusion is Fusion.QKV:
        query = architecture.num_attention_heads * architecture.head_dim
        key = architecture.num_key_value_heads * architecture.head_dim
        return ((query, *rest), (key, *rest), (key, *rest))
    if parameter.fusion is Fusion.GATE_UP:
        return ((architecture.ffn_hidden_size, *rest),) * 2
    if parameter.fusion is Fusion.VOCABULARY:
        return ((architecture.vocab_size, *rest),)
    return (parameter.shape,)


def fused_shard(
    parameter: Parameter, slices: Sequence[Any], architecture: Architecture, *, tp: int, rank: int
) -> Tensor:
    """The tensor-parallel shard ``rank`` of ``tp`` of a parameter.

    slices: its Hugging Face tensors, or readers of them that are indexed like tensors; only what the shard holds
    is read.
    """
    if parameter.fusion is Fusion.QKV:
        return _qkv_shard(slices, architecture, tp, rank)
    if parameter.fusion is Fusion.GATE_UP:
        size = architecture.ffn_hidden_size // tp
        return torch.cat([part[rank * size : (rank + 1) * size] for part in slices])
    if parameter.tp_dim is None:
        return slices[0][:]
    size = parameter.shape[parameter.tp_dim] // tp
    begin, end = rank * size, (rank + 1) * size
    if parameter.tp_dim == 1:
        return slices[0][:, begin:end]
    if parameter.fusion is not Fusion.VOCABULARY:
        return slices[0][begin:end]
    return pad_vocabulary(slices[0][begin : min(end, architecture.vocab_size)], size)


def pad_vocabulary(rows: Tensor, size: int) -> Tensor:
    """Zeros below ``rows``, up to ``size`` rows; itself where nothing is to pad."""
    if rows.size(0) == size:
        return rows
    return torch.cat([rows, rows.new_zeros(size - rows.size(0), *rows.shape[1:])])


def _qkv_shard(slices: Sequence[Any], architecture: Architecture, tp: int, rank: int) -> Tensor:
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
    rest = query.shape[1:]  # empty for biases
    parts = [part.reshape(groups, -1, head_dim, *rest) for part in (query, key, value)]
    return torch.cat(parts, 1).reshape(-1, *rest)


def to_hugging_face(parameter: Parameter, shards: Tensor, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Undo sharding and fusion; shards: [TP, *local shape]."""
    names, rest = parameter.hf_names, parameter.shape[1:]
    if parameter.fusion is Fusion.QKV:
        groups, head_dim = architecture.num_key_value_heads, architecture.head_dim
        per_group = architecture.num_attention_heads // groups
        fused = shards.reshape(groups, per_group + 2, head_dim, *rest)
        for name, part in zip(names, fused.split([per_group, 1, 1], 1), strict=True):
            yield name, part.reshape(-1, *rest)
    elif parameter.fusion is Fusion.GATE_UP:
        for name, part in zip(names, shards.chunk(2, 1), strict=True):
            yield name, part.reshape(-1, *rest)
    elif parameter.fusion is Fusion.VOCABULARY:
        yield names[0], shards.flatten(0, 1)[: architecture.vocab_size]
    elif parameter.tp_dim is None or len(shards) == 1:
        yield names[0], shards[0]
    else:
        yield names[0], torch.cat(shards.unbind(0), parameter.tp_dim)
