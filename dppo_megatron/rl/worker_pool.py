"""Processes that answer requests one by one under a wall time limit: for code that may hang or die.

What model and user code say crosses as JSON, never as pickles. A worker is a plain subprocess, started anew and not
forked: it shares no thread, device or lock with the trainer, and imports nothing of it but this module and its own.
"""

import importlib
import json
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0
_ORPHAN_SECONDS = 2.0  # past the time limit, to an orphan's own end
_MAX_CHUNK = 64  # requests that a worker is handed at once

Answer = Callable[[list[str]], Any]


@dataclass(frozen=True, slots=True)
class Lost:
    """What stands for the answer to a request whose worker was killed or died."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """time_limit_seconds: of one request. memory_bytes: of a worker's address space; None is no limit."""

    num_workers: int
    time_limit_seconds: float
    memory_bytes: int | None


class WorkerPool:
    """Workers that each call ``prepare`` once and its result on every request.

    prepare: ``module:function`` that takes JSON values and returns an ``Answer``; what that returns must be JSON too.
    chatty: a worker's standard output goes to standard error, and not nowhere.
    """

    def __init__(self, prepare: str, *arguments: Any, limits: WorkerLimits, chatty: bool = False) -> None:
        self._task = {"prepare": prepare, "arguments": arguments, "seconds": limits.time_limit_seconds}
        self._task["memory"] = limits.memory_bytes
        self._limits, self._chatty = limits, chatty
        self._workers: list[_Worker] = []

    def start(self) -> None:
        """Start one worker and wait until it is ready. Raises ValueError with what ``prepare`` raised as one."""
        self._add_workers(1)
        while not all(worker.is_ready for worker in self._workers):
            self._listen([])

    def ask(self, requests: Sequence[Sequence[str]]) -> list[Any]:
        """Answers in the order of the requests; ``Lost`` for one past its time, or on which a worker died.

        Raises RuntimeError where a worker cannot start, and ValueError with what ``prepare`` raised as one.
        """
        answers: list[Any] = [None] * len(requests)
        waiting = deque(range(len(requests)))
        while waiting or any(worker.jobs for worker in self._workers):
            self._add_workers(min(self._limits.num_workers, len(waiting)))
            size = max(1, min(_MAX_CHUNK, len(waiting) // (4 * self._limits.num_workers)))
            for worker in self._workers:
                if waiting and worker.is_ready and not worker.jobs:
                    worker.send([waiting.popleft() for _ in range(min(size, len(waiting)))], requests)
            waiting.extendleft(reversed(self._listen(answers)))
        return answers

    def close(self) -> None:
        """End the workers; a later call starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _add_workers(self, number: int) -> None:
        while len(self._workers) < number:
            self._workers.append(_Worker(self._task, chatty=self._chatty))

    def _listen(self, answers: list[Any]) -> list[int]:
        """Take what has been answered; returns requests that a lost worker had not come to."""
        patience = min(worker.deadline for worker in self._workers) - time.monotonic()
        spoken = wait([worker.connection for worker in self._workers], max(0.0, patience))
        undone: list[int] = []
        for worker in list(self._workers):
            if worker.connection in spoken:
                if not worker.receive(answers):
                    undone += self._discard(worker, answers, f"its process ended ({worker.ending()})")
            elif time.monotonic() > worker.deadline:
                limit = f"dppo.reward.time_limit_seconds = {self._limits.time_limit_seconds}"
                undone += self._discard(worker, answers, f"it took longer than {limit}")
        return undone

    def _discard(self, worker: "_Worker", answers: list[Any], reason: str) -> list[int]:
        worker.kill()
        self._workers.remove(worker)
        if not worker.is_ready:
            call = f"`{sys.executable} -c 'import {self._task['prepare'].partition(':')[0]}'`"
            raise RuntimeError(f"a worker process did not start; its message is on standard error, or see {call}")
        if worker.jobs:
            answers[worker.jobs.popleft()] = Lost(reason)
        return list(worker.jobs)


class _Worker:
    """One process, and the requests that it is at: their indices, the first the one it answers now."""

    def __init__(self, task: dict[str, Any], *, chatty: bool) -> None:
        self.connection, remote = multiprocessing.Pipe()
        self.is_ready = False
        self.jobs: deque[int] = deque()
        self.deadline = time.monotonic() + _START_SECONDS
        self._time_limit = task["seconds"]
        paths = filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""), *sys.path])
        program = f"from dppo_megatron.rl.worker_pool import serve; serve({remote.fileno()}, {json.dumps(task)!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            pass_fds=[remote.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
            stdin=subprocess.DEVNULL,
            stdout=2 if chatty else subprocess.DEVNULL,
        )
        remote.close()

    def send(self, jobs: list[int], requests: Sequence[Sequence[str]]) -> None:
        self.jobs.extend(jobs)
        self.deadline = time.monotonic() + self._time_limit
        with suppress(OSError):  # a worker that died while idle shows as an end of file
            self.connection.send_bytes(json.dumps([list(requests[job]) for job in jobs]).encode())

    def receive(self, answers: list[Any]) -> bool:
        """Take a message into the answers; false where the process has died. Raises ValueError of ``prepare``."""
        try:
            message = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return False
        if not self.is_ready and message is not None:
            self.kill()
            raise ValueError(message)
        if self.jobs:
            answers[self.jobs.popleft()] = message
        self.is_ready = True
        self.deadline = time.monotonic() + self._time_limit if self.jobs else float("inf")
        return True

    def ending(self) -> str:
        """How the process ended, for people."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def kill(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def serve(descriptor: int, text: str) -> None:
    """Be a worker: answer requests on an inherited socket until the parent is gone."""
    task = json.loads(text)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the parent decides; when it ends it closes the socket
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even inside a big-integer operation
    if task["memory"] is not None and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (task["memory"], task["memory"]))
    connection = Connection(descriptor)
    with suppress(EOFError, ConnectionError):
        answer = _prepared(task, connection)
        while answer is not None:
            for request in json.loads(connection.recv_bytes()):
                # The parent kills sooner; this is for a parent that died meanwhile.
                signal.setitimer(signal.ITIMER_REAL, task["seconds"] + _ORPHAN_SECONDS)
                result = answer(request)
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                connection.send_bytes(json.dumps(result).encode())


def _prepared(task: dict[str, Any], connection: Connection) -> Answer | None:
    module, _, name = task["prepare"].partition(":")
    try:
        answer: Answer = getattr(importlib.import_module(module), name)(*task["arguments"])
    except ValueError as error:
        connection.send_bytes(json.dumps(str(error)).encode())
        return None
    connection.send_bytes(b"null")
    return answer
