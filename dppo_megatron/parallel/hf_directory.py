"""The tensors of a local Hugging Face directory, read by slices and checked against the model's table."""

import json
import logging
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dppo_megatron.architecture import Architecture
from dppo_megatron.parallel.hf_fusion import fused_shard, hf_shapes
from dppo_megatron.parallel.hf_names import Parameter

logger = logging.getLogger(__name__)

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLE_INDEX, _PICKLE_SINGLE = "pytorch_model.bin.index.json", "pytorch_model.bin"


class HfDirectory:
    """A source of weights in Hugging Face's names; files are mapped, and only what is asked for is read.

    Raises ValueError when the directory or its weights are missing, or files and index disagree.
    """

    tp = 1
    """Its tensors are whole."""

    def __init__(self, directory: Path, architecture: Architecture, *, allow_pickle: bool = False) -> None:
        """``allow_pickle``: read ``pytorch_model.bin`` files where there are no safetensors; never their code."""
        self.directory, self.architecture = directory, architecture
        self._tensors: dict[str, Any] = {}
        index, single = directory / _INDEX, directory / _SINGLE
        if index.is_file():
            self._open_indexed(index)
        elif single.is_file():
            self._tensors = _open_safetensors(single)
        elif any((directory / name).is_file() for name in (_PICKLE_INDEX, _PICKLE_SINGLE)):
            if not allow_pickle:
                raise ValueError(
                    f"policy.model_name: {directory} holds pickle files (.bin) and no safetensors; they are read by "
                    "tools/convert_hf_to_megatron.py --allow-pickle only"
                )
            if (directory / _PICKLE_INDEX).is_file():
                self._open_indexed(directory / _PICKLE_INDEX)
            else:
                self._tensors = _open_pickle(directory / _PICKLE_SINGLE)
        else:
            raise ValueError(f"policy.model_name: {directory} holds no {_SINGLE} and no {_INDEX}")

    def _open_indexed(self, index: Path) -> None:
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"policy.model_name: {index} is not an index with a weight_map: {error!r}") from error
        for file in sorted(set(weight_map.values())):
            path = self.directory / file
            if Path(file).name != file or not path.is_file():
                raise ValueError(f"policy.model_name: {index} names {file}, and there is no such file")
            found = _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)
            listed = {name for name, place in weight_map.items() if place == file}
            if found.keys() != listed:
                raise ValueError(
                    f"policy.model_name: {index.name} and {path} disagree on {_some(found.keys() ^ listed)}"
                )
            self._tensors |= found

    def check(self, table: Sequence[Parameter]) -> None:
        """Compare names, shapes and types of all tensors with the model's table; nothing is read.

        Raises ValueError naming tensors that are missing, left over, or of a wrong shape or type.
        """
        shapes = {
            name: shape
            for parameter in table
            for name, shape in zip(parameter.hf_names, hf_shapes(parameter, self.architecture), strict=True)
        }
        if self.architecture.tied and "lm_head.weight" in self._tensors:
            # Not needed; it must then be the embedding, which ``shard`` compares.
            shapes["lm_head.weight"] = shapes[table[0].hf_names[0]]
        computed = {name for name in self._tensors if _COMPUTED.fullmatch(name)}
        if computed:
            logger.warning("%s: rotary inv_freq tensors are computed anew, not read", self.directory)
        if missing := shapes.keys() - self._tensors.keys():
            raise ValueError(f"policy.model_name: {self.directory} holds no tensor {_some(missing)}")
        if unknown := self._tensors.keys() - shapes.keys() - computed:
            raise ValueError(f"policy.model_name: {self.directory} holds tensors of no known place: {_some(unknown)}")
        for name, shape in shapes.items():
            found = tuple(_shape(self._tensors[name]))
            if found != shape:
                raise ValueError(
                    f"policy.model_name: {name} in {self.directory} has shape {found}; config.json gives {shape}"
                )
        for parameter in table:
            self.dtype(parameter)

    def slice(self, name: str) -> Any:
        """A lazily read tensor: index it to read just that part."""
        if name not in self._tensors:
            raise ValueError(f"policy.model_name: {self.directory} holds no tensor {name!r}")
        return self._tensors[name]

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The type of a parameter's tensors. Raises ValueError where it is not one, or not a plain float."""
        found = {_dtype(self.slice(name)) for name in parameter.hf_names}
        if len(found) > 1 or not found <= {*_DTYPES.values()}:
            raise ValueError(
                f"policy.model_name: {', '.join(parameter.hf_names)} have type {', '.join(map(str, found))}; "
                f"supported: one of {', '.join(map(str, _DTYPES.values()))}"
            )
        return found.pop()

    def shard(self, parameter: Parameter, *, tp: int, rank: int) -> Tensor:
        """Read the shard ``rank`` of ``tp`` of a parameter; only the part of its tensors that it holds.

        Raises ValueError where the output layer of a tied model is stored and differs from the embedding.
        """
        slices = [self.slice(name) for name in parameter.hf_names]
        shard = fused_shard(parameter, slices, self.architecture, tp=tp, rank=rank)
        tied = parameter.hf_names == ("model.embed_tokens.weight",) and self.architecture.tied
        if tied and "lm_head.weight" in self._tensors:
            copy = fused_shard(parameter, [self.slice("lm_head.weight")], self.architecture, tp=tp, rank=rank)
            if not torch.equal(shard, copy):
                raise ValueError(
                    f"policy.model_name: {self.directory} says tie_word_embeddings, but its lm_head.weight is not "
                    "its model.embed_tokens.weight"
                )
        return shard


def _open_safetensors(path: Path) -> dict[str, Any]:
    try:
        handle = safe_open(path, "pt")
        return {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (not a dictionary)
    except SafetensorError as error:
        raise ValueError(f"policy.model_name: {path} is truncated or not a safetensors file: {error}") from error


def _open_pickle(path: Path) -> dict[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"policy.model_name: {path} is damaged or holds more than tensors: {reason}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"policy.model_name: {path} does not hold a dictionary of tensors")
    return loaded


def _shape(tensor: Any) -> Sequence[int]:
    return tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()


def _dtype(tensor: Any) -> Any:
    if isinstance(tensor, Tensor):
        return tensor.dtype
    return _DTYPES.get(tensor.get_dtype(), tensor.get_dtype())


def _some(names: Any) -> str:
    names = sorted(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize
