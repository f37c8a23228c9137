"""Directories of checkpoints: each appears whole, carries checksums of its files, and disappears whole.

A visible checkpoint is ``step_N``. Names that begin with a dot are being written or deleted; what a run that was
killed leaves of them is swept away at the next start.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

_CHECKSUMS = "checksums.json"
_VISIBLE = re.compile(r"step_(\d+)")
_HIDDEN = re.compile(r"\.step_\d+\..+")
_CHUNK_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class FileDigest:
    """A file of a checkpoint: its path in there, its size, the BLAKE2b digest of its content."""

    path: str
    num_bytes: int
    digest: str


def find_checkpoints(directory: Path) -> dict[int, Path]:
    """The visible checkpoints by the steps done before them."""
    if not directory.is_dir():
        return {}
    named = ((_VISIBLE.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in named if match}


def pending_path(directory: Path, *, num_steps_done: int, writer: int) -> Path:
    """Where a checkpoint is written. writer: of this process; what a killed one's children still write lies apart."""
    return directory / f".step_{num_steps_done}.{writer}.incomplete"


def sync_files(directory: Path, *, rank: int, size: int) -> list[FileDigest]:
    """Force every ``size``-th file of a directory to the disk, and digest it; rank 0 forces the folders too."""
    if rank == 0:
        for folder in [directory, *(path for path in directory.rglob("*") if path.is_dir())]:
            _sync(folder)
    return [_digest(path, directory, sync=True) for path in _files(directory)[rank::size]]


def write_checksums(directory: Path, digests: Sequence[FileDigest]) -> None:
    """Write down what every file of a checkpoint must be."""
    with (directory / _CHECKSUMS).open("w", encoding="utf-8") as file:
        json.dump([asdict(digest) for digest in digests], file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync(directory)


def find_damage(directory: Path, *, rank: int, size: int) -> list[str]:
    """What is wrong with every ``size``-th file of a checkpoint; nothing where they are as they were written."""
    try:
        expected = [FileDigest(**entry) for entry in json.loads((directory / _CHECKSUMS).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return [f"{_CHECKSUMS} is missing"]
    except (ValueError, TypeError) as error:
        return [f"{_CHECKSUMS} cannot be read: {error}"]
    return [problem for entry in expected[rank::size] if (problem := _compare(directory, entry))]


def _compare(directory: Path, expected: FileDigest) -> str | None:
    path = directory / expected.path
    if not path.is_file():
        return f"{expected.path} is missing"
    if path.stat().st_size != expected.num_bytes:
        return f"{expected.path} has {path.stat().st_size} bytes, {expected.num_bytes} were written"
    if _digest(path, directory, sync=False) != expected:
        return f"{expected.path} is not what was written: its checksum differs"
    return None


def publish(pending: Path) -> Path:
    """Make a checkpoint visible, in place of one of the same step; it is on the disk when this returns."""
    final = pending.with_name(pending.name.split(".")[1])
    if final.exists():
        delete(final)
    pending.replace(final)
    _sync(final.parent)
    return final


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; killed half-way it is not visible any more."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.deleted")
    checkpoint.replace(hidden)
    shutil.rmtree(hidden)


def set_aside(checkpoint: Path) -> Path:
    """Take a damaged checkpoint out of the way, for a person to look at; returns where it lies then."""
    aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.replace(aside)


def sweep(directory: Path) -> None:
    """Remove what a killed run was writing or deleting."""
    if directory.is_dir():
        for path in directory.iterdir():
            if _HIDDEN.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path.name != _CHECKSUMS)


def _digest(path: Path, directory: Path, *, sync: bool) -> FileDigest:
    digest, num_bytes = blake2b(digest_size=16), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
        if sync:
            os.fsync(file.fileno())
    return FileDigest(path.relative_to(directory).as_posix(), num_bytes, digest.hexdigest())


def _sync(folder: Path) -> None:
    # A rename is on the disk when its folder is.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
