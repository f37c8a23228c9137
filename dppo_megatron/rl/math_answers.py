"""Whether a completion's answer equals the right one, with math-verify kept in processes that can be killed.

An answer from a policy is hostile input: ``9^{9^{9^9}}`` holds the interpreter inside one big-integer
operation, where no Python signal handler runs. So text and plain numbers are compared here, and only what
is left reaches math-verify, in a worker process under a wall time limit.
"""

import logging
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from multiprocessing.connection import Connection, wait
from pathlib import Path

from dppo_megatron.config.schema import MathEnvConfig, RewardConfig

logger = logging.getLogger(__name__)

_MAX_DEPTH = 10  # brackets within brackets; math-verify's grammar takes exponential time in it
_MAX_DIGITS = 1000
_START_SECONDS = 120.0
_ORPHAN_SECONDS = 2.0  # past the time limit, to an orphan's own end
_WORKER_MEMORY = 4 << 30  # bytes of address space

_BOXED = "\\boxed{"
_MATH = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_ANSWER_IS = re.compile(r"\banswer(?:\s+is\s*:?|\s*[:=])[\s*]*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n")
_PLAIN_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|[+-]?\.\d+"
_NUMBER = re.compile(_PLAIN_NUMBER)
_LAST_NUMBER = re.compile(rf"(?<![\w.,)\]}}+-])(?:{_PLAIN_NUMBER})")
_NUMBER_AND_WORDS = re.compile(rf"({_PLAIN_NUMBER})\s+[^\W\d_]{{3,}}[^\d\\]*")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}")
_TEXT = re.compile(r"\\text(?:bf|it|rm)?\{([^{}]*)\}")


def extract_answer(completion: str, *, max_answer_chars: int) -> str | None:
    r"""Find the final answer in a completion.

    The last ``\boxed{...}``; else what follows the last "answer is" or "answer:"; else the last formula
    between LaTeX delimiters; else the last number. None where there is none, where the last box never closes,
    or where the answer is longer than ``max_answer_chars``; outside a box only that many last characters of
    the completion are read.
    """
    start = completion.rfind(_BOXED)
    if start >= 0:
        return _balanced(completion[start + len(_BOXED) :][: max_answer_chars + 1])
    tail = completion[-max_answer_chars:]
    stated = deque(_ANSWER_IS.finditer(tail), maxlen=1)
    if stated:
        return _stated_answer(tail[stated[0].end() :])
    formulas = deque(_MATH.finditer(tail), maxlen=1)
    if formulas:
        return formulas[0][formulas[0].lastindex or 0]
    numbers = deque(_LAST_NUMBER.finditer(tail), maxlen=1)
    return numbers[0][0] if numbers else None


def _balanced(text: str) -> str | None:
    """What stands before the brace that closes a box, None where none does."""
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[: brace.start()]
    return None


def _stated_answer(tail: str) -> str:
    sentence = tail[: end.start()] if (end := _SENTENCE_END.search(tail)) else tail
    if formula := _MATH.search(sentence):
        return formula[formula.lastindex or 0]
    sentence = sentence.strip(" *")
    counted = _NUMBER_AND_WORDS.fullmatch(sentence)
    return counted[1] if counted else sentence


def _normalize(answer: str) -> str:
    """Strip what carries no meaning: delimiters, thin spaces, a final full stop, percent and currency signs."""
    for old, new in (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("{,}", ","), ("\n", " ")):
        answer = answer.replace(old, new)
    for noise in ("\\!", "\\,", "\\(", "\\)", "\\[", "\\]", "\\$", "$"):
        answer = answer.replace(noise, "")
    answer = answer.strip().removesuffix(".").removesuffix("%").removesuffix("\\").strip()
    text = _TEXT.fullmatch(answer)
    return text[1].strip() if text else answer


def _as_fraction(answer: str) -> Fraction | None:
    if len(answer) > _MAX_DIGITS:
        return None
    if latex := _FRACTION.fullmatch(answer):
        top, bottom = int(latex[1] + "1") * int(latex[2]), int(latex[3])
    elif _NUMBER.fullmatch(answer):
        number, _, divisor = answer.replace(",", "").partition("/")
        top, bottom = Fraction(number), int(divisor or 1)
    else:
        return None
    return Fraction(top) / bottom if bottom else None


def _is_well_formed(answer: str) -> bool:
    """Whether braces close in order and nothing is nested deeper than the cap."""
    depth = braces = 0
    for bracket in re.findall(r"\\[{}]|[()\[\]{}]", answer):
        step = 1 if bracket[-1] in "([{" else -1
        depth += step
        braces += step * (bracket in "{}")
        if braces < 0 or depth > _MAX_DEPTH:
            return False
    return braces == 0


def quick_verdict(candidate: str, *, gold: str) -> bool | None:
    """Compare two normalised answers as text and as exact numbers, None where that cannot tell."""
    if candidate == gold:
        return bool(gold)
    left, right = _as_fraction(candidate), _as_fraction(gold)
    if left is not None and right is not None:
        if left == right:
            return True
        if "." not in candidate + gold:
            return False  # a decimal may be a rounded one, which math-verify accepts to six places
    return None if _is_well_formed(candidate) else False


class MathAnswers:
    """Verifies answers; starts its worker processes when one is first needed.

    ``num_failures``: answers of the last call that exceeded the time limit or broke their worker.

    Raises ValueError on limits that are not positive.
    """

    def __init__(self, reward: RewardConfig, *, env: MathEnvConfig) -> None:
        for name, value in (
            ("dppo.reward.time_limit_seconds", reward.time_limit_seconds),
            ("dppo.reward.max_answer_chars", reward.max_answer_chars),
            ("env.math.num_workers", env.num_workers),
        ):
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be greater than 0")
        self._limits = reward
        self._num_workers = env.num_workers
        self._workers: list[_Worker] = []
        self.num_failures = 0

    def verify(self, completions: Sequence[str], *, answers: Sequence[str]) -> list[bool]:
        """Whether each completion [N] ends in its right answer [N], which may be a number, LaTeX or boxed.

        An answer that exceeds the time limit is wrong.

        Raises RuntimeError where a worker process cannot start.
        """
        pairs: list[tuple[str, str] | None] = []
        verdicts: dict[tuple[str, str] | None, bool | None] = {None: False}
        for completion, answer in zip(completions, answers, strict=True):
            pair = self._pair(completion, answer=answer)
            pairs.append(pair)
            if pair is not None and pair not in verdicts:
                verdicts[pair] = quick_verdict(pair[0], gold=pair[1])
        open_pairs = [pair for pair in verdicts if pair is not None and verdicts[pair] is None]
        verdicts.update(zip(open_pairs, self._ask_workers(open_pairs), strict=True))
        self.num_failures = sum(verdicts[pair] is None for pair in pairs)
        if self.num_failures:
            logger.warning("%d of %d math answers got no verdict in time", self.num_failures, len(pairs))
        return [bool(verdicts[pair]) for pair in pairs]

    def close(self) -> None:
        """End the worker processes; a later call starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()

    def _pair(self, completion: str, *, answer: str) -> tuple[str, str] | None:
        candidate = extract_answer(completion, max_answer_chars=self._limits.max_answer_chars)
        if candidate is None:
            return None
        start = answer.rfind(_BOXED)
        boxed = _balanced(answer[start + len(_BOXED) :]) if start >= 0 else None
        return _normalize(candidate), _normalize(answer if boxed is None else boxed)

    def _ask_workers(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Verdicts in the order of the pairs, None for a worker that was killed or died."""
        verdicts: list[bool | None] = [None] * len(pairs)
        waiting = deque(range(len(pairs)))
        while waiting or any(worker.job is not None for worker in self._workers):
            self._hand_out(pairs, waiting)
            patience = min(worker.deadline for worker in self._workers) - time.monotonic()
            answered = wait([worker.connection for worker in self._workers], max(0.0, patience))
            for worker in list(self._workers):
                if worker.connection in answered and worker.receive(verdicts):
                    continue
                if worker.connection in answered or time.monotonic() > worker.deadline:
                    self._discard(worker)
        return verdicts

    def _hand_out(self, pairs: Sequence[tuple[str, str]], waiting: deque[int]) -> None:
        num_jobs = len(waiting) + sum(worker.job is not None for worker in self._workers)
        for _ in range(min(self._num_workers, num_jobs) - len(self._workers)):
            self._workers.append(_Worker(self._limits.time_limit_seconds))
        for worker in self._workers:
            if waiting and worker.is_ready and worker.job is None:
                worker.send(waiting[0], pair=pairs[waiting[0]])
                waiting.popleft()

    def _discard(self, worker: "_Worker") -> None:
        worker.kill()
        self._workers.remove(worker)
        if not worker.is_ready:
            raise RuntimeError(
                "a math-verify worker process did not start; "
                f"its message is on standard error, or see `{sys.executable} -c 'import math_verify'`"
            )


class _Worker:
    """One math-verify process and the request that it is at.

    A plain subprocess rather than a multiprocessing one: that would import the caller's main module again,
    and torch with it.
    """

    def __init__(self, time_limit_seconds: float) -> None:
        self.connection, remote = multiprocessing.Pipe()
        self.is_ready = False
        self.job: int | None = None
        self.deadline = time.monotonic() + _START_SECONDS
        self._time_limit = time_limit_seconds
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        call = f"serve({remote.fileno()}, time_limit_seconds={time_limit_seconds!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from dppo_megatron.rl.math_answers import serve; {call}"],
            pass_fds=[remote.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        remote.close()

    def send(self, job: int, *, pair: tuple[str, str]) -> None:
        self.job = job
        self.deadline = time.monotonic() + self._time_limit
        with suppress(OSError):  # a worker that died while idle shows as an end of file
            self.connection.send(pair)

    def receive(self, verdicts: list[bool | None]) -> bool:
        """Take a message into the verdicts; false where the process has died."""
        try:
            message: bool = self.connection.recv()
        except (EOFError, OSError):
            return False
        if self.job is not None:
            verdicts[self.job] = message
        self.is_ready, self.job, self.deadline = True, None, float("inf")
        return True

    def kill(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def serve(descriptor: int, *, time_limit_seconds: float) -> None:
    """Be a worker: answer (candidate, gold) requests on an inherited socket until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; an interrupted run closes the socket
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even inside a big-integer operation
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (_WORKER_MEMORY, _WORKER_MEMORY))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    connection = Connection(descriptor)
    _are_equivalent("x+1", "1+x")  # compiles the grammar, outside any answer's time limit
    with suppress(EOFError, ConnectionError):
        connection.send(True)
        while True:
            candidate, gold = connection.recv()
            # The parent kills sooner; this is for a parent that died meanwhile.
            signal.setitimer(signal.ITIMER_REAL, time_limit_seconds + _ORPHAN_SECONDS)
            verdict = _are_equivalent(candidate, gold)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            connection.send(verdict)


def _are_equivalent(candidate: str, gold: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify  # in the workers alone: sympy is slow to load

    # LaTeX alone: the reader of plain expressions would find a right number inside malformed text.
    readings = [
        parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        for text in (gold, candidate)
    ]
    return bool(verify(readings[0], readings[1], timeout_seconds=None))
