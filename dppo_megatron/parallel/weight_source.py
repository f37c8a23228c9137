"""Where weights are read from: a Hugging Face directory, or a checkpoint of ours, layout-free or sharded."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dppo_megatron.architecture import Architecture
from dppo_megatron.parallel.hf_directory import HfDirectory
from dppo_megatron.parallel.hf_fusion import to_hugging_face
from dppo_megatron.parallel.hf_names import Parameter
from dppo_megatron.parallel.sharded_files import LAYOUT_FILE, ShardedFiles
from dppo_megatron.parallel.torch_dist_files import METADATA_FILE, TorchDistFiles

POLICY_DIRECTORY = "policy"
"""Where a checkpoint directory keeps its weights, beside config.json and the tokenizer."""


class WeightSource(Protocol):
    """What hands out any rank's shard of any parameter. ``tp``: the tensor parallelism of what is stored."""

    tp: int

    def check(self, table: Sequence[Parameter]) -> None:
        """Raise ValueError naming what is missing, left over, or of a wrong shape or type; reads no tensor."""
        ...

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The type of a parameter's tensors as stored."""
        ...

    def shard(self, parameter: Parameter, *, tp: int, rank: int) -> Tensor:
        """Read shard ``rank`` of ``tp``; ``parameter`` is of the table of that ``tp``."""
        ...


def open_source(directory: Path, architecture: Architecture, *, allow_pickle: bool = False) -> WeightSource:
    """The weights of a model directory, whatever their format.

    Raises ValueError when there are none, or they are not whole.
    """
    policy = directory / POLICY_DIRECTORY
    if (policy / METADATA_FILE).is_file():
        return TorchDistFiles(policy, architecture)
    if (policy / LAYOUT_FILE).is_file():
        return ShardedFiles(policy, architecture)
    return HfDirectory(directory, architecture, allow_pickle=allow_pickle)


def read_hugging_face(
    source: WeightSource, parameter: Parameter, architecture: Architecture
) -> Iterator[tuple[str, Tensor]]:
    """Read a parameter whole, as Hugging Face tensors; ``parameter`` is of the table of ``source.tp``."""
    shards = [source.shard(parameter, tp=source.tp, rank=rank) for rank in range(source.tp)]
    return to_hugging_face(parameter, shards[0][None] if source.tp == 1 else torch.stack(shards), architecture)
