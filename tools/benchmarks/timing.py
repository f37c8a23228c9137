"""Processor time of actions that are to be compared."""

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Spent = dict[int, tuple[float, float]]
"""Lines of a log -> wall and processor seconds when they were there."""


def interleaved_medians(actions: Sequence[Callable[[], object]], *, turns: int) -> list[float]:
    """Median processor seconds of each action, the actions in turn, after a turn to warm up."""
    seconds: list[list[float]] = [[] for _ in actions]
    for turn in range(turns + 1):
        for action, times in zip(actions, seconds, strict=True):
            start = time.process_time()
            action()
            if turn:
                times.append(time.process_time() - start)
    return [statistics.median(times) for times in seconds]


def spent_at_lines(command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None) -> Spent:
    """Run a command; by the number of lines of its log, wall and processor seconds since its start. Linux only.

    Read every 20 ms, so lines that come closer together than that are missed. Raises CalledProcessError.
    """
    spent: Spent = {}
    start = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        lines = log.read_bytes().count(b"\n") if log.is_file() else 0
        # The fields after the program's name, which may hold spaces: user and system time are the 12th and 13th.
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        processor = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        spent.setdefault(lines, (time.perf_counter() - start, processor))
        time.sleep(0.02)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return spent
