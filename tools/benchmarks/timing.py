"""Processor time of actions that are to be compared."""

import statistics
import time
from collections.abc import Callable, Sequence


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
