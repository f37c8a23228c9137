"""Convert checkpoints between Hugging Face's format and megatron-core's, one tensor at a time.

A conversion writes into ``.NAME.incomplete`` beside its target, file by file, and keeps a journal of the files that
are done; started again it continues behind them. The target appears by one rename, when all is written, with a
manifest of every file's checksum.
"""

import hashlib
import json
import logging
import os
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
from dppo_megatron.read_ahead import read_ahead

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


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the target: its size, its checksum, and where its chunks lie if it has any."""

    record: FileRecord
    chunks: tuple[Chunk, ...] = ()


class _Workplace:
    """The unfinished target: a directory, and the journal of the files in it that are done."""

    def __init__(self, target: Path, *, identity: str, num_bytes: int) -> None:
        if target.exists():
            raise ValueError(f"{target} exists; remove it or name another target")
        self.target = target
        self.directory = target.with_name(f".{target.name}.incomplete")
        self._identity = identity
        self._entries = self._read_journal()
        for name, entry in list(self._entries.items()):
            path = self.directory / name
            if not path.is_file() or path.stat().st_size != entry.record.num_bytes:
                del self._entries[name]
        left = num_bytes - sum(entry.record.num_bytes for entry in self._entries.values())
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        if free < left:
            raise ValueError(f"{target}: {left / 1e9:.1f} GB are still to write and {free / 1e9:.1f} GB are free")

    def _read_journal(self) -> dict[str, Entry]:
        path = self.directory / _JOURNAL
        journal: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if journal.get("identity") != self._identity:
            shutil.rmtree(self.directory, ignore_errors=True)
            return {}
        return {name: _entry_from_json(entry) for name, entry in journal["files"].items()}

    def done(self, name: str) -> Entry | None:
        """What is known of a file that is complete, or None."""
        return self._entries.get(name)

    def keep(self, name: str, entry: Entry) -> None:
        """Note that a file is complete and on the disk."""
        self._entries[name] = entry
        files = {key: asdict(value) for key, value in self._entries.items()}
        atomic_write_text(self.directory / _JOURNAL, json.dumps({"identity": self._identity, "files": files}))

    def publish(self, model: Model) -> None:
        """Add the companions and the manifest, and give the directory its name."""
        copy_companions(model.directory, self.directory)
        files = {}
        for path in sorted(self.directory.rglob("*")):
            name = str(path.relative_to(self.directory))
            if path.is_file() and name not in (MANIFEST, _JOURNAL):
                entry = self._entries.get(name)
                files[name] = asdict(entry.record if entry else _settle(path))
        text = json.dumps({"source": str(model.directory), "files": files}, indent=2)
        atomic_write_text(self.directory / MANIFEST, text)
        self.directory.replace(self.target)
        # Last: a conversion killed before the rename can still be continued.
        (self.target / _JOURNAL).unlink()


def _entry_from_json(entry: Mapping[str, Any]) -> Entry:
    chunks = (
        Chunk(**chunk | {"offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])})
        for chunk in entry["chunks"]
    )
    return Entry(FileRecord(**entry["record"]), tuple(chunks))


def hash_file(path: Path) -> FileRecord:
    """Size and checksum of a file as it lies there."""
    with path.open("rb") as file:
        return FileRecord(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _settle(path: Path) -> FileRecord:
    # A small file that was not written through HashingFile: on the disk before the directory gets its name.
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return hash_file(path)


class _Meter:
    """Counts the bytes of tensors on their way, and warns of values that are not finite."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def skip(self, num_bytes: int) -> None:
        """Count what is there already."""
        self._done += num_bytes
        self._progress(self._done, self._total)

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Look at a tensor that is about to be written."""
        integer, exponent = _EXPONENTS[tensor.dtype]
        bits = tensor.contiguous().flatten().view(integer)
        # Without its sign, a value that is not finite is the largest; in blocks that stay in the cache.
        if any(int((block & torch.iinfo(integer).max).amax()) >= exponent for block in bits.split(2**18)):
            logger.warning("%s holds values that are NaN or infinite", name)
        self.skip(tensor.numel() * tensor.element_size())
        return tensor


def _num_bytes(model: Model) -> int:
    sizes = (torch.Size(p.shape).numel() * dtype.itemsize for p, dtype in zip(model.table, model.dtypes, strict=True))
    return sum(sizes)


def convert_to_megatron(model: Model, target: Path, *, layout: TargetLayout | None, progress: Progress) -> None:
    """Write a checkpoint that the trainer loads: layout-free torch_dist, or one file a rank of ``layout``.

    Raises ValueError where the target exists, the disk is too small, or the layout does not fit the model; OSError
    where writing fails: what was written is taken up the next time.
    """
    identity = f"{model.fingerprint()} {layout}"
    if layout is not None:
        layout.check(model.architecture)
    work = _Workplace(target, identity=identity, num_bytes=_num_bytes(model))
    policy = work.directory / POLICY_DIRECTORY
    policy.mkdir(exist_ok=True)
    meter = _Meter(_num_bytes(model), progress)
    if layout is None:
        _write_torch_dist(model, work, meter)
    else:
        _write_sharded(model, work, meter, layout)
    work.publish(model)


def _write_torch_dist(model: Model, work: _Workplace, meter: _Meter) -> None:
    _check_stacked_types(model)
    policy, chunks = work.directory / POLICY_DIRECTORY, []
    for number, group in enumerate(_groups(model)):
        name = f"{POLICY_DIRECTORY}/__{number}_0.distcp"
        entry = work.done(name)
        if entry is None:
            tensors = ((p, meter.take(p.name, model.source.shard(p, tp=1, rank=0))) for p in group)
            written = write_chunks(work.directory / name, read_ahead(tensors))
            entry = Entry(written.record, written.chunks)
            work.keep(name, entry)
        else:
            meter.skip(entry.record.num_bytes)
        chunks += entry.chunks
    write_metadata(policy, chunks, table=model.table, dtypes=model.dtypes, architecture=model.architecture)


def _check_stacked_types(model: Model) -> None:
    # Layers share one tensor of the checkpoint, so one type.
    kinds: dict[str, torch.dtype] = {}
    for parameter, dtype in zip(model.table, model.dtypes, strict=True):
        kind = parameter.name.replace(f"layers.{parameter.layer}.", "layers.")
        if kinds.setdefault(kind, dtype) is not dtype:
            raise ValueError(f"{', '.join(parameter.hf_names)}: {dtype}, but {kinds[kind]} in layers before")


def _groups(model: Model) -> Iterator[list[Parameter]]:
    group, filled = [], 0
    for parameter, dtype in zip(model.table, model.dtypes, strict=True):
        size = torch.Size(parameter.shape).numel() * dtype.itemsize
        if group and filled + size > _CHUNK_FILE_BYTES:
            yield group
            group, filled = [], 0
        group.append(parameter)
        filled += size
    yield group


def _write_sharded(model: Model, work: _Workplace, meter: _Meter, layout: TargetLayout) -> None:
    architecture, num_layers = model.architecture, model.architecture.num_layers
    table = model_parameters(architecture, tp=layout.tp)
    last = (layout.pp - 1, layout.virtual_pp - 1)
    places: dict[tuple[int, int], list[tuple[str, Parameter, torch.dtype]]] = {}
    for parameter, dtype in zip(table, model.dtypes, strict=True):
        chunk = layout.chunk_of(parameter, num_layers)
        places.setdefault(chunk, []).append((layout.local_name(parameter, num_layers), parameter, dtype))
    if architecture.tied and layout.pp > 1:
        places[last].append(("output_layer.weight", table[0], model.dtypes[0]))
    for chunk in sorted(places):
        for rank in range(layout.tp):
            name = f"{POLICY_DIRECTORY}/{layout.file_name(rank, *chunk)}"
            rows = places[chunk]
            entries = [TensorEntry(key, p.local_shape(layout.tp), dtype) for key, p, dtype in rows]
            if work.done(name) is not None:
                meter.skip(sum(entry.num_bytes for entry in entries))
                continue
            tensors = (
                (key, meter.take(p.name, model.source.shard(p, tp=layout.tp, rank=rank))) for key, p, _ in rows
            )
            work.keep(name, Entry(write_safetensors(work.directory / name, entries, read_ahead(tensors))))
    layout.write(work.directory / POLICY_DIRECTORY)


def convert_to_hf(model: Model, target: Path, *, progress: Progress, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a Hugging Face directory, weights in the types of the source, configuration and tokenizer as they were.

    Raises as ``convert_to_megatron`` does.
    """
    files = plan_files(model.table, model.dtypes, model.architecture, shard_bytes=shard_bytes)
    total = sum(entry.num_bytes for file in files for entry in file.entries)
    work = _Workplace(target, identity=f"{model.fingerprint()} {shard_bytes}", num_bytes=total)
    meter = _Meter(total, progress)
    for file in files:
        if work.done(file.name) is not None:
            meter.skip(sum(entry.num_bytes for entry in file.entries))
            continue
        wanted = [entry.name for entry in file.entries]
        tensors = ((name, meter.take(name, tensor)) for name, tensor in _hf_tensors(model, wanted))
        work.keep(file.name, Entry(write_safetensors(work.directory / file.name, file.entries, read_ahead(tensors))))
    write_index(work.directory, files)
    work.publish(model)


def _hf_tensors(model: Model, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a model; a parameter whose parts straddle two files is read for both."""
    wanted = set(names)
    for parameter in model_parameters(model.architecture, tp=model.source.tp):
        if wanted.isdisjoint(parameter.hf_names):
            continue
        for name, tensor in read_hugging_face(model.source, parameter, model.architecture):
            if name in wanted:
                yield name, tensor


def verify(model: Model, target: Path, *, progress: Progress) -> None:
    """Read a converted checkpoint again: files against the manifest, every tensor against the source, bit for bit.

    Raises ValueError naming the first file or tensor that differs.
    """
    if not (target / MANIFEST).is_file():
        raise ValueError(f"{target} holds no {MANIFEST}: it was not converted here, or not to the end")
    manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    for name, expected in manifest["files"].items():
        if not (target / name).is_file():
            raise ValueError(f"{target} lacks {name}, which its manifest names")
        if asdict(hash_file(target / name)) != expected:
            raise ValueError(f"{target / name} is not what was written: its checksum differs from the manifest's")
    other, done = Model.open(target), 0
    total = _num_bytes(model)
    tables = (model_parameters(model.architecture, tp=side.source.tp) for side in (model, other))
    for mine, theirs in zip(*tables, strict=True):
        _check_replicas(other, theirs)
        pairs = zip(
            read_hugging_face(model.source, mine, model.architecture),
            read_hugging_face(other.source, theirs, other.architecture),
            strict=True,
        )
        for (name, expected), (_, found) in pairs:
            if not _same_bits(expected, found):
                raise ValueError(f"{target}: {name} differs from the source's")
            done += expected.numel() * expected.element_size()
            progress(done, total)


def _check_replicas(model: Model, parameter: Parameter) -> None:
    # What every tensor-parallel rank stores whole must be the same there; only the first is read below.
    if parameter.tp_dim is None:
        ranks = range(model.source.tp)
        first, *others = (model.source.shard(parameter, tp=model.source.tp, rank=rank) for rank in ranks)
        if not all(_same_bits(first, other) for other in others):
            raise ValueError(f"{model.directory}: {parameter.name} differs from the source's on some rank")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    integer = _EXPONENTS[one.dtype][0]  # so that NaN equals itself
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))
