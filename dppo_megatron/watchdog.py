"""Ends a run that hangs: a time limit a stage, and every rank's stacks in the run's directory."""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from dppo_megatron.config.schema import WatchdogConfig

EXIT_STALLED = 3
DIRECTORY = "stalled"
PARENT = "DPPO_LAUNCHER_PID"
"""Environment variable in which our own launcher names its process: ranks end when it is gone."""

_POLL_SECONDS = 1.0
_GRACE_SECONDS = 5.0
"""From the first rank's alarm to the end, so that every rank that can writes its stacks."""
_BACKSTOP_SECONDS = 3 * _GRACE_SECONDS
"""Past the limit, to the end of a process whose interpreter is held inside one C call."""


class Watchdog:
    """Watches this rank's stages from a thread of its own; a context manager.

    A stage's limit is ``slowest_factor`` times the longest that it has taken so far, and at least ``min_seconds``.
    Past it the rank writes ``stalled/rank_N.txt`` (its stage, the stack of every thread), and so does every rank
    that sees another's file; seconds later all of them exit with ``EXIT_STALLED``, and the launcher ends what is
    left. Time is the host's monotonic clock.
    """

    def __init__(self, config: WatchdogConfig, *, directory: Path, rank: int) -> None:
        self._config, self._directory, self._rank = config, directory / DIRECTORY, rank
        self._stage, self._since = "set-up", time.monotonic()
        self._slowest: dict[str, float] = {}
        self._ended = threading.Event()
        self._guards = False
        self._parent = int(os.environ.get(PARENT, "0"))

    def retire(self) -> None:
        """Move the stacks of an earlier start away; rank 0 does, before any rank watches."""
        if self._directory.exists():
            stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(self._directory.stat().st_mtime))
            self._directory.rename(self._directory.with_name(f"{DIRECTORY}-{stamp}"))

    def watch(self, stage: str) -> None:
        """The main thread now works at ``stage``; its limit starts anew."""
        now = time.monotonic()
        self._slowest[self._stage] = max(self._slowest.get(self._stage, 0.0), now - self._since)
        self._stage, self._since = stage, now
        self._arm_backstop()

    def limit(self, stage: str) -> float:
        """Seconds that a stage may take."""
        return max(self._config.min_seconds, self._config.slowest_factor * self._slowest.get(stage, 0.0))

    def __enter__(self) -> Self:
        if self._config.enabled:
            self._guards = True
            self._since = time.monotonic()
            self._arm_backstop()
            threading.Thread(target=self._guard, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guards = False
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def _arm_backstop(self) -> None:
        # A thread of the C library: it needs no interpreter, and writes to standard error. Only within the context,
        # whose end disarms it: else it would end this process long after the run.
        if self._guards:
            seconds = self.limit(self._stage) + _BACKSTOP_SECONDS
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)

    def _guard(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            if self._parent and os.getppid() != self._parent:
                os._exit(EXIT_STALLED)  # the launcher was killed: nobody would end or report this rank
            stage, seconds = self._stage, time.monotonic() - self._since
            if seconds > self.limit(stage):
                self._end(f"rank {self._rank} has been in stage {stage} for {seconds:.0f} s", is_first=True)
            elif self._directory.exists():
                self._end(f"rank {self._rank} is in stage {stage} for {seconds:.0f} s", is_first=False)

    def _end(self, what: str, *, is_first: bool) -> None:
        path = self._directory / f"rank_{self._rank}.txt"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                file.write(f"{what}; the limit is {self.limit(self._stage):.0f} s\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            sys.stderr.write(f"dppo: {path} cannot be written: {error}\n")
        if is_first:
            sys.stderr.write(
                f"dppo: error: {what}, longer than the limit of {self.limit(self._stage):.0f} s "
                f"(dppo.watchdog); the ranks' stacks are in {self._directory}\n"
            )
        sys.stderr.flush()
        time.sleep(_GRACE_SECONDS)
        os._exit(EXIT_STALLED)
