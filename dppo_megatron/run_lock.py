"""One run a directory: a lock that dies with its holder, and says who holds it."""

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

NAME = ".run.lock"
HEARTBEAT_SECONDS = 10.0
_STALE_SECONDS = 6 * HEARTBEAT_SECONDS


class RunLock:
    """Holds ``directory/.run.lock`` while the context lasts; rank 0 of a run takes it.

    The kernel lets go of the lock when the process dies, however it dies. Some shared file systems keep such locks
    to each machine: there the file's time, renewed every ``HEARTBEAT_SECONDS``, tells a live run on another machine
    from a dead one. Its age is measured by the file system's own clock, so machines' clocks may differ.

    Raises: ValueError on entry where another run holds the directory, naming machine and process.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._descriptor = -1
        self._released = threading.Event()

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while self._descriptor < 0:
            self._try_once()
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        threading.Thread(target=self._beat, name="run lock", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        if self._is_current(self._descriptor):  # the directory may be lost, which must not hide why the run ends
            self._path.unlink()  # before the lock goes: who waits for it finds another file, and retries
        os.close(self._descriptor)
        self._descriptor = -1

    def _try_once(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = self._holder(descriptor)
            os.close(descriptor)
            raise self._refusal(holder) from error
        if not self._is_current(descriptor):
            os.close(descriptor)
            return
        holder = self._holder(descriptor)
        if holder.get("host") not in (None, socket.gethostname()) and self._age(descriptor) < _STALE_SECONDS:
            os.close(descriptor)
            raise self._refusal(holder)
        self._descriptor = descriptor

    def _is_current(self, descriptor: int) -> bool:
        # Another run may have ended, and removed the file, between our opening and our locking it.
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _holder(self, descriptor: int) -> dict[str, object]:
        try:
            return dict(json.loads(os.pread(descriptor, 4096, 0)))
        except ValueError:
            return {}  # just created, or its writer died at once

    def _age(self, descriptor: int) -> float:
        probe = self._path.with_name(f"{NAME}.{socket.gethostname()}.{os.getpid()}")
        probe.touch()
        try:
            return probe.stat().st_mtime - os.fstat(descriptor).st_mtime
        finally:
            probe.unlink()

    def _refusal(self, holder: dict[str, object]) -> ValueError:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('since', '?')}"
        return ValueError(
            f"{self._path.parent} is in use by another run ({who}); name another directory, or end that run"
        )

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            try:
                os.utime(self._path)
            except OSError:
                return  # the directory is gone: the run's next write says so
