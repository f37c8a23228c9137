"""Whether a completion's answer equals the right one, with math-verify kept in processes that can be killed.

An answer from a policy is hostile input: ``9^{9^{9^9}}`` holds the interpreter inside one big-integer
operation, where no Python signal handler runs. So text and plain numbers are compared here, and only what
is left reaches math-verify, in a worker process under a wall time limit.
"""

import logging
import re
from collections import deque
from collections.abc import Sequence
from fractions import Fraction

from dppo_megatron.config.schema import MathEnvConfig, RewardConfig
from dppo_megatron.rl.worker_pool import Answer, Lost, WorkerLimits, WorkerPool

logger = logging.getLogger(__name__)

_MAX_DEPTH = 10  # brackets within brackets; math-verify's grammar takes exponential time in it
_MAX_DIGITS = 1000
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
        limits = WorkerLimits(env.num_workers, reward.time_limit_seconds, _WORKER_MEMORY)
        self._pool = WorkerPool("dppo_megatron.rl.math_answers:prepare_worker", limits=limits)
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
        for pair, verdict in zip(open_pairs, self._pool.ask(open_pairs), strict=True):
            verdicts[pair] = None if isinstance(verdict, Lost) else verdict
        self.num_failures = sum(verdicts[pair] is None for pair in pairs)
        if self.num_failures:
            logger.warning("%d of %d math answers got no verdict in time", self.num_failures, len(pairs))
        return [bool(verdicts[pair]) for pair in pairs]

    def close(self) -> None:
        """End the worker processes; a later call starts new ones."""
        self._pool.close()

    def _pair(self, completion: str, *, answer: str) -> tuple[str, str] | None:
        candidate = extract_answer(completion, max_answer_chars=self._limits.max_answer_chars)
        if candidate is None:
            return None
        start = answer.rfind(_BOXED)
        boxed = _balanced(answer[start + len(_BOXED) :]) if start >= 0 else None
        return _normalize(candidate), _normalize(answer if boxed is None else boxed)


def prepare_worker() -> Answer:
    """What a worker process answers (candidate, gold) requests with."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    _are_equivalent("x+1", "1+x")  # compiles the grammar, outside any answer's time limit
    return lambda pair: _are_equivalent(*pair)


def _are_equivalent(candidate: str, gold: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify  # in the workers alone: sympy is slow to load

    # LaTeX alone: the reader of plain expressions would find a right number inside malformed text.
    readings = [
        parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        for text in (gold, candidate)
    ]
    return bool(verify(readings[0], readings[1], timeout_seconds=None))
