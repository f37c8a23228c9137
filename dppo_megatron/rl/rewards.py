"""Rewards of completions: exact match, mathematical equivalence, or a function of the user's own."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dppo_megatron.batches import FinishReason, FloatArray, RolloutBatch
from dppo_megatron.config.schema import EnvConfig, RewardConfig
from dppo_megatron.rl.math_answers import MathAnswers
from dppo_megatron.rl.worker_pool import Lost, WorkerLimits, WorkerPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

REWARD_NAMES = ("exact_match", "math")
_UNKNOWN_TOKEN = "\ufffd"


class Reward(Protocol):
    """Scores completions, one prompt and one right answer each.

    requires_stop: a completion cut at the limit scores 0 whatever it says.
    num_failures: answers of the last call that got no verdict; they score 0.
    """

    requires_stop: bool
    num_failures: int

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> FloatArray:
        """Rewards, float64 [N], of N completions."""
        ...

    def close(self) -> None:
        """Release what the reward holds, such as worker processes."""
        ...


class ExactMatch:
    """1 where the completion is the answer, character for character, and ended by itself; else 0."""

    requires_stop: bool = True
    num_failures: int = 0

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> FloatArray:
        pairs = zip(completions, answers, strict=True)
        return np.array([completion == answer for completion, answer in pairs], np.float64)

    def close(self) -> None:
        pass


class MathReward:
    """1 where the completion's final answer equals the right one mathematically, else 0."""

    requires_stop: bool = False

    def __init__(self, answers: MathAnswers) -> None:
        self._answers = answers
        self.num_failures = 0

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> FloatArray:
        verdicts = self._answers.verify(completions, answers=answers)
        self.num_failures = self._answers.num_failures
        return np.array(verdicts, np.float64)

    def close(self) -> None:
        self._answers.close()


class UserReward:
    """A user's ``function(prompt, completion, answer) -> float`` in worker processes, each failure counted."""

    requires_stop: bool = False

    def __init__(self, reward: RewardConfig) -> None:
        """Start a worker. Raises ValueError where the function cannot be imported or called there."""
        memory = None if reward.memory_gb is None else int(reward.memory_gb * 2**30)
        limits = WorkerLimits(reward.num_workers, reward.time_limit_seconds, memory)
        self._pool = WorkerPool(
            "dppo_megatron.rl.user_reward:prepare_worker", reward.function, limits=limits, chatty=True
        )
        self._seen_kinds: set[str] = set()
        self._last_error = ""
        self.num_failures = 0
        self._pool.start()

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> FloatArray:
        """Rewards, float64 [N]; 0 for an answer on which the function failed, hung or ended its process.

        Raises RuntimeError where it failed on all of them.
        """
        replies = self._pool.ask(list(zip(prompts, completions, answers, strict=True)))
        scores = [self._score(reply) for reply in replies]
        self.num_failures = scores.count(None)
        if scores and self.num_failures == len(scores):
            raise RuntimeError(f"the reward function failed on all {len(scores)} answers: {self._last_error}")
        return np.array([0.0 if score is None else score for score in scores], np.float64)

    def close(self) -> None:
        self._pool.close()

    def _score(self, reply: Any) -> float | None:
        if isinstance(reply, float):
            return reply
        kind, message, trace = (reply.reason, reply.reason, "") if isinstance(reply, Lost) else reply
        self._last_error = message
        if kind not in self._seen_kinds:
            self._seen_kinds.add(kind)
            logger.warning("the reward function failed, reward 0 (said once a kind): %s", message)
            logger.debug("traceback of the reward function: %s", trace)
        return None


def make_reward(env_name: str, *, reward: RewardConfig, env: EnvConfig) -> Reward:
    """Build the reward that ``dppo.reward.function`` names, or the data set's ``env_name`` where it is null.

    Raises ValueError on an unknown name and on a function that cannot be imported or called.
    """
    if reward.function is not None and ":" in reward.function:
        return UserReward(reward)
    field, name = ("env_name", env_name)
    if reward.function is not None:
        field, name = ("dppo.reward.function", reward.function)
    match name:
        case "exact_match":
            return ExactMatch()
        case "math":
            return MathReward(MathAnswers(reward, env=env.math))
    allowed = ", ".join(REWARD_NAMES)
    raise ValueError(f"{field} is {name!r}; allowed are {allowed}, and module:function in dppo.reward.function")


def score_rollouts(rollouts: RolloutBatch, *, reward: Reward, tokenizer: "PreTrainedTokenizerBase") -> FloatArray:
    """Rewards of all completions, float64 [N].

    A completion's text is all its tokens, special ones included, without a final stop token; an id that the
    tokenizer does not know shows as U+FFFD.

    Raises RuntimeError where the reward's result is not N finite numbers.
    """
    if not len(rollouts.completions):
        return np.zeros(0)
    num_generations = len(rollouts.completions) // len(rollouts.prompts)
    stopped = rollouts.finish_reasons == FinishReason.STOP
    ends = rollouts.completions.offsets[1:] - stopped
    completions = _decode(
        [
            rollouts.completions.values[start:end]
            for start, end in zip(rollouts.completions.offsets[:-1], ends, strict=True)
        ],
        tokenizer=tokenizer,
    )
    prompts, answers = (
        [text for text in texts for _ in range(num_generations)]
        for texts in (rollouts.prompts.texts, rollouts.prompts.answers)
    )
    rewards = np.asarray(reward(prompts, completions, answers), np.float64)
    if rewards.shape != stopped.shape or not np.isfinite(rewards).all():
        raise RuntimeError(
            f"the reward must return {len(stopped)} finite numbers; it returned an array of shape "
            f"{rewards.shape} with {np.count_nonzero(~np.isfinite(rewards))} that are not finite"
        )
    return np.where(stopped, rewards, 0.0) if reward.requires_stop else rewards


def _decode(rows: list[np.ndarray], *, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Texts of rows of token ids, in one batch.

    A model's vocabulary may be padded past the tokenizer's. The tokenizer drops such ids without a word,
    which would turn a wrong completion into a right one.
    """
    used = np.unique(np.concatenate(rows))
    tokens = tokenizer.convert_ids_to_tokens(used.tolist())
    unknown = used[[token is None for token in tokens]]
    pieces = [np.split(row, np.flatnonzero(np.isin(row, unknown))) for row in rows]
    flat = [piece.tolist() for row in pieces for piece in row]  # still with those ids, which vanish
    try:
        texts = iter(tokenizer.batch_decode(flat, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    except Exception as error:  # tokenizers, which is written in Rust, raises Exception itself
        raise RuntimeError(f"the tokenizer cannot decode the completions: {type(error).__name__}: {error}") from error
    return [_UNKNOWN_TOKEN.join(next(texts) for _ in row) for row in pieces]
