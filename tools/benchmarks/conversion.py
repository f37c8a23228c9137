"""Measure a conversion both ways: peak anonymous memory, and speed against copying the same bytes in the same run.

python tools/make_random_checkpoint.py /data/random-8b --size 8b
python tools/benchmarks/conversion.py /data/random-8b /data/work
"""

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dppo_megatron.conversion import Model, convert_to_hf, convert_to_megatron

_COPY_BLOCK = 16 * 2**20


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process; pages of mapped files are not counted. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of a call, and how far anonymous memory rose above where it stood."""

    seconds: float
    peak_bytes: int


def measure(call: Callable[[], None]) -> Measured:
    """Run a call; memory is sampled every 5 ms."""
    base, peak, stop = anonymous_bytes(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    try:
        call()
    finally:
        seconds = time.perf_counter() - start
        stop.set()
        thread.join()
    return Measured(seconds, max(peak - base, 0))


def copy_files(source: Path, target: Path) -> None:
    """Copy the weights' files in large blocks, to the disk as a conversion does."""
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as reader, (target / path.name).open("wb") as writer:
            while block := reader.read(_COPY_BLOCK):
                writer.write(block)
            writer.flush()
            os.fsync(writer.fileno())


def drop_cache(directory: Path) -> None:
    """Ask the system to forget the directory's pages, so that reading them is reading the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> int:
    """Run the command line; prints one JSON object a measurement, as it is made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="Hugging Face directory")
    parser.add_argument("work", type=Path, help="directory for copies, on the same disk; made and removed")
    options = parser.parse_args()
    source, work = options.source, options.work
    work.mkdir()

    def silent(done: int, total: int) -> None:
        """No bar: its thread would be measured too."""

    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    calls: dict[str, Callable[[], None]] = {
        "copy": lambda: copy_files(source, work / "copy"),
        "to_megatron": lambda: convert_to_megatron(
            Model.open(source), work / "megatron", layout=None, progress=silent
        ),
        "to_hugging_face": lambda: convert_to_hf(Model.open(work / "megatron"), work / "back", progress=silent),
    }
    try:
        for name, call in calls.items():
            drop_cache(source)
            drop_cache(work)
            measured = measure(call)
            result = {
                "what": name,
                "bytes": size,
                "seconds": round(measured.seconds, 1),
                "mb_per_second": round(size / measured.seconds / 1e6),
                "peak_anonymous_mb": round(measured.peak_bytes / 1e6),
            }
            print(json.dumps(result), flush=True)
            shutil.rmtree(work / "copy", ignore_errors=True)
    finally:
        shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
