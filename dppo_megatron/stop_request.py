"""Ending a run early without losing its steps: signals, a time to have saved by, and how a step is left."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_SAME_REQUEST_SECONDS = 2.0
"""A launcher and its scheduler may both deliver one request."""

EXIT_RESUME = 75
"""EX_TEMPFAIL: the run was asked to stop and has saved; start it again to go on (the batch script does)."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to stop: torchrun's and Slurm's end, and Slurm's warning (``--signal=USR1@300``)."""


class Stopped(Exception):  # noqa: N818 - not an error
    """The run ended early, as it was asked to. ``checkpoint``: where its steps are saved, None where they are not."""

    def __init__(self, reason: str, *, num_steps_done: int, checkpoint: Path | None = None) -> None:
        super().__init__(reason)
        self.reason, self.num_steps_done, self.checkpoint = reason, num_steps_done, checkpoint


class _Interrupted(BaseException):
    """Raised by a signal inside ``attempt``: not an Exception, so that no code on the way swallows it."""


class StopRequest:
    """Remembers what asked this process to stop; a context manager that holds the signal handlers.

    The first signal asks; a second one ends the process at once, which harms no file: checkpoints appear by one
    rename. Signal handlers belong to the main thread; in another this object only keeps the time.
    """

    def __init__(self, *, must_save_by_seconds: float | None, now: Callable[[], float] = time.monotonic) -> None:
        """``must_save_by_seconds``: from now, by which a last checkpoint must be complete; None for no limit."""
        self._now, self._start = now, now()
        self._limit = must_save_by_seconds
        self._signal: signal.Signals | None = None
        self._signalled_at = 0.0
        self._is_interruptible = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def signalled(self) -> bool:
        """Whether a signal asked this process to stop."""
        return self._signal is not None

    def leaves_no_time(self, *, next_seconds: float) -> bool:
        """Whether ``next_seconds`` more would pass the time to have saved by."""
        return self._limit is not None and self._now() - self._start + next_seconds > self._limit

    @property
    def reason(self) -> str:
        """What asked, for people; another rank's signal where this one got none."""
        if self._signal is not None:
            return f"signal {self._signal.name}"
        return "checkpointing.checkpoint_must_save_by" if self._limit is not None else "a signal to another rank"

    def attempt(self, work: Callable[[], T]) -> T | None:
        """Do local work that a signal may cut short at once, or None where it was cut short.

        No collective may be part of it: this process leaves it alone.
        """
        if self.signalled:
            return None
        try:
            self._is_interruptible = True
            result = work()
            self._is_interruptible = False
        except _Interrupted:
            return None
        finally:
            self._is_interruptible = False
        return result

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signalled and self._now() - self._signalled_at > _SAME_REQUEST_SECONDS:
            os._exit(128 + number)
        if self.signalled:
            return
        self._signal, self._signalled_at = signal.Signals(number), self._now()
        if self._is_interruptible:
            self._is_interruptible = False
            raise _Interrupted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for one in SIGNALS:
                self._previous[one] = signal.signal(one, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one, handler in self._previous.items():
            signal.signal(one, handler)
        self._previous.clear()
