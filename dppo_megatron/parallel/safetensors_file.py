"""safetensors files written one tensor at a time, with their checksums."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor that a file is to hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that was written: its size in bytes and the SHA-256 of what it holds."""

    num_bytes: int
    sha256: str


class HashingFile:
    """A new file that is written from front to back and hashed meanwhile; on the disk when closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self.num_bytes = 0

    def __enter__(self) -> "HashingFile":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._thread.shutdown()
        with self._file:
            if kind is None:
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        hashing = self._thread.submit(self._hash.update, data)
        try:
            self._file.write(data)
            self._file.flush()
        finally:
            hashing.result()  # the caller may use the memory again
        self._start_writing_out(len(data))
        self.num_bytes += len(data)

    def _start_writing_out(self, length: int) -> None:
        # Else the disk is idle until the end, and all of the file then waits for it.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), self.num_bytes, length, os.POSIX_FADV_DONTNEED)

    def record(self) -> FileRecord:
        """What was written so far."""
        return FileRecord(self.num_bytes, self._hash.hexdigest())


def write_safetensors(
    path: Path, entries: Sequence[TensorEntry], tensors: Iterable[tuple[str, Tensor]]
) -> FileRecord:
    """Write a file whose tensors come one by one, in the order of ``entries``; at most one is held.

    Source: the safetensors format (8 bytes of header size, a JSON header, values back to back).
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        end = position + entry.num_bytes
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values start aligned
    with HashingFile(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry, (name, tensor) in zip(entries, tensors, strict=True):
            assert (name, tuple(tensor.shape), tensor.dtype) == (entry.name, entry.shape, entry.dtype), name
            values = tensor.cpu().contiguous().flatten().view(torch.uint8)
            file.write(values.numpy().data)
        assert file.num_bytes == 8 + len(text) + position
    return file.record()
