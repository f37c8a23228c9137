"""Convert checkpoints between Hugging Face's format and megatron-core's, one tensor at a time.

A conversion writes into ``.NAME.incomplete`` beside its target, file by file, and keeps a journal of the files that
are done; started again it continues behind them. The target appears by one rename, when all is written, with a
manifest of every file's checksum.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dppo_megatron.architecture import Architecture, read_architecture
from dppo_megatron.atomic_file import atomic_write_text
from dppo_megatron.model_source import copy_companions, read_model_config
from dppo_megatron.parallel.hf_files import SHARD_BYTES, plan_files, write_index
from dppo_megatron.parallel.hf_names import Parameter, model_parameters
from dppo_megatron.parallel.safetensors_file import FileRecord, TensorEntry, write_safetensors
from dppo_megatron.parallel.sharded_files import TargetLayout
from dppo_megatron.parallel.torch_dist_files import Chunk, write_chunks, write_metadata
from dppo_megatron.parallel.weight_source import POLICY_DIRECTORY, WeightSource, open_source, read_hugging_face

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""
_JOURNAL = "journal.json"
_CHUNK_FILE_BYTES = 2**30
_EXPONENTS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


@dataclass(frozen=True, slots=True)
class Model:
    """An opened and checked source of weights. ``dtypes``: of each parameter of ``table``, whose shards are whole."""

    directory: Path
    architecture: Architecture
    source: WeightSource
    table: tuple[Parameter, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def open(cls, directory: Path, *, allow_pickle: bool = False) -> "Model":
        """Open a model directory. Raises ValueError for what is missing, left over or damaged in it."""
        architecture = read_architecture(read_model_config(directory))
        source = open_source(directory, architecture, allow_pickle=allow_pickle)
        source.check(model_parameters(architecture, tp=source.tp))
        table = model_parameters(architecture, tp=1)
        return cls(directory, architecture, source, table, tuple(source.dtype(parameter) for parameter in table))

    def fingerprint(self) -> str:
        """Changes when a file of the directory does, by name, size or time."""
        digest = hashlib.sha256()
        for path in sorted(self.directory.rglob("*")):
            if path.is_file():
                stat = path.stat()
                digest.update(f"{path.relative_to(self.directory)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()
