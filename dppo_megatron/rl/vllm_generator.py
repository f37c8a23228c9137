"""Rollouts by vLLM in the trainer's own processes, independent of the trainer's layout.

The ranks of an engine schedule alike and so must ask alike: they pool their prompts, all of them run all requests
of the pool, and each keeps the completions of its own prompts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import NoReturn, Protocol

import numpy as np
from torch import Tensor

from dppo_megatron import device
from dppo_megatron.batches import FinishReason, IntArray, PromptBatch, Ragged, RolloutBatch, Sampling
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.generator import NonFiniteLogitsError
from dppo_megatron.rl.vllm_engine import Completion, Request

Pool = Callable[[PromptBatch], Sequence[PromptBatch]]
"""From this rank's prompts to those of every rank of its engine, in the order of ranks; called by all of them."""

_SEED_BITS = 62  # vLLM's seeds are signed


class Engine(Protocol):
    """What a generator asks of an engine; see VllmEngine."""

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    @property
    def is_busy(self) -> bool: ...
    def step(self) -> list[Completion]: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self, *, healthy: bool) -> None: ...


class VllmGenerator:
    """vLLM behind the generator protocol, every request with a seed of its own key.

    Whether a completion depends on what shares its batch is vLLM's to say: it promises independence on some
    GPUs only.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        weight_names: frozenset[str],
        max_model_len: int,
        time_limit_seconds: float,
        pool: Pool,
        engine_rank: int,
        tensor_parallel_size: int,
    ) -> None:
        """Take an engine, still without weights.

        weight_names: every tensor that ``load_weights`` must bring. max_model_len: tokens of prompt and completion.
        time_limit_seconds: of one ``generate``. engine_rank: this rank's place in its engine of
        ``tensor_parallel_size`` ranks.
        """
        self.tensor_parallel_size = tensor_parallel_size
        self._engine, self._weight_names = engine, weight_names
        self._max_model_len, self._time_limit_seconds = max_model_len, time_limit_seconds
        self._pool, self._engine_rank = pool, engine_rank
        self._version: int | None = None
        self._failure: str | None = None
        # The engine works in a thread, so that this one can wait for it with a limit.
        self._thread = ThreadPool(1, initializer=device.use, initargs=(device.current(),))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Hand the stream on to the engine, and make it forget what it computed under the weights before.

        Raises: RuntimeError for a tensor that is left out, unknown or comes twice.
        """
        self._version = None
        counted = _Counted(weights, self._weight_names)
        self._engine.reload(counted)
        counted.require_all()
        # The prefix cache holds keys and values of the weights before.
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM's prefix cache could not be reset: requests are still running")
        self._version = version

    def generate(self, prompts: PromptBatch, draws: Draws, sampling: Sampling) -> RolloutBatch:
        """Sample G completions a prompt; called by every rank of the engine.

        Raises: RuntimeError, with the requests' names, where the engine fails, is too slow or falls short; and
        before weights were loaded. ValueError where a prompt leaves no room for its completion.
        """
        if self._failure is not None:
            raise RuntimeError(f"the engine has failed before: vLLM {self._failure}")
        if self._version is None:
            raise RuntimeError("the engine has no weights: load_weights comes first")
        shares = self._pool(prompts)
        requests = [request for share in shares for request in self._requests(share, draws, sampling)]
        self._engine.wake()
        completions = self._run(requests)
        self._engine.sleep()
        first = sum(len(share) for share in shares[: self._engine_rank]) * sampling.num_generations
        mine = requests[first : first + len(prompts) * sampling.num_generations]
        return _to_rollouts(
            [completions[request.name] for request in mine],
            prompts=prompts,
            sampling=sampling,
            version=self._version,
        )

    def close(self) -> None:
        """End the engine; one that has failed is left to end with the process."""
        self._thread.terminate()
        self._engine.close(healthy=self._failure is None)

    def _requests(self, prompts: PromptBatch, draws: Draws, sampling: Sampling) -> Iterator[Request]:
        """Every completion of the prompts, in the order of the batch."""
        size, limits = sampling.num_generations, sampling.new_token_limits(prompts.tokens.lengths)
        self._require_room(prompts, limits)
        ids, occurrences = prompts.prompt_ids, prompts.occurrences
        words = draws.words(sampling.purpose, ids[:, None], occurrences[:, None], np.arange(size))
        seeds = (words >> np.uint64(64 - _SEED_BITS)).tolist()
        for row in range(len(prompts)):
            tokens = prompts.tokens[row].tolist()
            for index in range(size):
                yield Request(
                    name=f"{ids[row]}.{occurrences[row]}.{index}",
                    prompt=tokens,
                    seed=seeds[row][index],
                    temperature=sampling.temperature,
                    max_new_tokens=int(limits[row]),
                    stop_token_ids=sampling.stop_token_ids,
                )

    def _require_room(self, prompts: PromptBatch, limits: IntArray) -> None:
        too_long = np.flatnonzero(prompts.tokens.lengths + limits > self._max_model_len)
        if len(too_long):
            row = int(too_long[0])
            raise ValueError(
                f"policy.generation.vllm_cfg.max_model_len = {self._max_model_len}: prompt {prompts.prompt_ids[row]} "
                f"has {prompts.tokens.lengths[row]} tokens; allowed: {self._max_model_len - limits[row]}, to leave "
                f"room for {limits[row]} new ones"
            )

    def _run(self, requests: Sequence[Request]) -> dict[str, Completion]:
        """Finish all requests within the limit; completions by request name."""
        completions: dict[str, Completion] = {}
        errors: list[BaseException] = []
        limit = self._time_limit_seconds
        deadline = time.monotonic() + limit

        def work() -> None:
            for request in requests:
                self._engine.add(request)
            while self._engine.is_busy and time.monotonic() < deadline:
                for completion in self._engine.step():
                    _check(completion)
                    completions[completion.name] = completion

        # So it stays where this thread is interrupted and the engine works on.
        self._failure = "was interrupted"
        # The callback carries what the engine raised, whatever it is, out of its thread.
        done = self._thread.apply_async(work, error_callback=errors.append)
        done.wait(limit)
        missing = [request.name for request in requests if request.name not in completions]
        if errors:
            self._fail(f"failed with {type(errors[0]).__name__}: {errors[0]}", missing, cause=errors[0])
        if missing and time.monotonic() >= deadline:
            self._fail(f"was not done after {limit:g} s (dppo.rollout.time_limit_seconds)", missing)
        if missing:
            self._fail(f"returned {len(requests) - len(missing)} of {len(requests)} completions", missing)
        self._failure = None
        return completions

    def _fail(self, what: str, unfinished: Sequence[str], *, cause: BaseException | None = None) -> NoReturn:
        self._failure = what
        raise RuntimeError(f"vLLM {what}; unfinished requests: {_listed(unfinished)}") from cause


class _Counted:
    """A weight stream that knows what has come and what should."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], names: frozenset[str]) -> None:
        self._weights = weights
        self._pending = set(names)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            if name not in self._pending:
                raise RuntimeError(f"weight stream: {name} is unknown to the engine, or came twice")
            self._pending.remove(name)
            yield name, tensor

    def require_all(self) -> None:
        """Raise RuntimeError where a tensor did not come: vLLM would keep the old one."""
        if self._pending:
            raise RuntimeError(f"weight stream: nothing came for {', '.join(sorted(self._pending))}")


def _check(completion: Completion) -> None:
    tokens, logprobs = len(completion.tokens), len(completion.logprobs)
    if not tokens or tokens != logprobs or completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"request {completion.name} ended with {completion.finish_reason!r}, {tokens} tokens and {logprobs} "
            "log-probs; a completion has at least one token, and a log-prob for each"
        )


def _to_rollouts(
    completions: Sequence[Completion], *, prompts: PromptBatch, sampling: Sampling, version: int
) -> RolloutBatch:
    tokens = Ragged.from_rows([completion.tokens for completion in completions])
    values = [np.array(completion.logprobs, np.float32) for completion in completions]
    logprobs = np.concatenate([np.zeros(0, np.float32), *values])
    if not np.isfinite(logprobs).all():
        raise NonFiniteLogitsError(f"sampling: log-probs are not finite (weights of version {version})")
    stopped = np.isin(tokens.values[tokens.offsets[1:] - 1], sampling.stop_token_ids)
    return RolloutBatch(
        prompts=prompts,
        completions=tokens,
        sampled_logprobs=logprobs,
        finish_reasons=np.where(stopped, FinishReason.STOP, FinishReason.LENGTH).astype(np.int64),
        version=version,
    )


def _listed(names: Sequence[str], *, most: int = 8) -> str:
    """Names of requests (prompt id, occurrence, index), the first few."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
