import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dppo_megatron.batches import FinishReason, PromptBatch, Purpose, Ragged, RolloutBatch, Sampling
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.vllm_engine import Completion, Request
from dppo_megatron.rl.vllm_generator import VllmGenerator

STOP = 1
SAMPLING = Sampling(num_generations=2, temperature=0.7, max_new_tokens=3, stop_token_ids=(STOP,))
NAMES = frozenset({"embedding", "lm_head.weight"})


def prompts(lengths: Sequence[int] = (2, 3, 1), *, first: int = 10) -> PromptBatch:
    """Prompts 10, 11, ... of the given lengths."""
    size = len(lengths)
    return PromptBatch(
        prompt_ids=np.arange(first, first + size),
        occurrences=np.zeros(size, np.int64),
        minibatches=np.zeros(size, np.int64),
        tokens=Ragged.from_rows([[7] * length for length in lengths]),
        texts=("",) * size,
        answers=("",) * size,
        weights=np.ones(size),
        num_candidates=np.array([size]),
    )


def weights(*names: str) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield name, torch.zeros(1)


def answer(request: Request) -> Completion:
    """A completion that depends on the seed alone, of which every other one stops."""
    tokens = [2 + request.seed % 50, STOP] if request.seed % 2 else [2 + request.seed % 50, 3, 4]
    return Completion(
        request.name, tokens, [-float(token) for token in tokens], "stop" if STOP in tokens else "length"
    )


class FakeEngine:
    """Answers one request a step, the newest first; ``turn`` may spoil a completion or fail."""

    def __init__(self, turn: Callable[[Request], Completion | None] = answer) -> None:
        self.turn, self.queue, self.asked = turn, [], []
        self.loaded: list[str] = []
        self.cache_is_fresh, self.closed_healthy = False, None

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loaded = [name for name, _ in weights]
        self.cache_is_fresh = False

    def reset_prefix_cache(self) -> bool:
        self.cache_is_fresh = not self.queue
        return self.cache_is_fresh

    def add(self, request: Request) -> None:
        self.queue.append(request)
        self.asked.append(request)

    @property
    def is_busy(self) -> bool:
        return bool(self.queue)

    def step(self) -> list[Completion]:
        completion = self.turn(self.queue.pop())
        return [] if completion is None else [completion]

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self, *, healthy: bool) -> None:
        self.closed_healthy = healthy


def generator(
    engine: FakeEngine,
    *,
    limit: float = 60.0,
    pool: Callable[[PromptBatch], Sequence[PromptBatch]] = lambda mine: [mine],
    rank: int = 0,
) -> VllmGenerator:
    result = VllmGenerator(
        engine,
        weight_names=NAMES,
        max_model_len=8,
        time_limit_seconds=limit,
        pool=pool,
        engine_rank=rank,
        tensor_parallel_size=1,
    )
    result.load_weights(weights(*NAMES), version=4)
    return result


def rows(rollouts: RolloutBatch) -> list[list[int]]:
    return [rollouts.completions[row].tolist() for row in range(len(rollouts.completions))]


def test_completions_come_in_the_order_of_prompts_with_logprobs_reasons_and_version() -> None:
    engine = FakeEngine()
    rollouts = generator(engine).generate(prompts(), Draws(3, 5), SAMPLING)
    expected = [answer(request) for request in engine.asked]
    assert [request.name for request in engine.asked] == ["10.0.0", "10.0.1", "11.0.0", "11.0.1", "12.0.0", "12.0.1"]
    assert rows(rollouts) == [completion.tokens for completion in expected]
    assert rollouts.sampled_logprobs.tolist() == [value for completion in expected for value in completion.logprobs]
    reasons = [FinishReason.STOP if STOP in one.tokens else FinishReason.LENGTH for one in expected]
    assert rollouts.finish_reasons.tolist() == reasons
    assert set(reasons) == {FinishReason.STOP, FinishReason.LENGTH}
    assert rollouts.version == 4


def test_a_seed_follows_its_key_alone_and_no_two_are_equal() -> None:
    def seeds(batch: PromptBatch, draws: Draws, sampling: Sampling = SAMPLING) -> dict[str, int]:
        engine = FakeEngine()
        generator(engine).generate(batch, draws, sampling)
        return {request.name: request.seed for request in engine.asked}

    whole = seeds(prompts(), Draws(3, 5))
    assert len(set(whole.values())) == 6
    assert all(0 <= seed < 2**63 for seed in whole.values())
    assert seeds(prompts((3,), first=11), Draws(3, 5)).items() <= whole.items()
    validation = Sampling(2, 0.7, 3, (STOP,), Purpose.VALIDATION)
    for other in (
        seeds(prompts(), Draws(3, 6)),
        seeds(prompts(), Draws(4, 5)),
        seeds(prompts(), Draws(3, 5), validation),
    ):
        assert set(other.values()).isdisjoint(whole.values())


def test_ranks_of_an_engine_ask_for_the_pool_and_keep_their_own() -> None:
    shares = [prompts((2,)), prompts((), first=20), prompts((1, 4), first=30)]
    whole = [FakeEngine() for _ in shares]
    kept = [
        generator(engine, pool=lambda _: shares, rank=rank).generate(shares[rank], Draws(0, 0), SAMPLING)
        for rank, engine in enumerate(whole)
    ]
    assert whole[0].asked == whole[1].asked == whole[2].asked
    assert [len(one.completions) for one in kept] == [2, 0, 4]
    expected = [answer(request).tokens for request in whole[0].asked]
    assert [row for one in kept for row in rows(one)] == expected


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("embedding",), "nothing came for lm_head.weight"),
        (("embedding", "lm_head.weight", "rotary"), "rotary is unknown to the engine"),
        (("embedding", "embedding"), "embedding is unknown to the engine, or came twice"),
    ],
)
def test_a_stream_that_is_not_the_whole_model_leaves_an_engine_without_weights(
    names: tuple[str, ...], problem: str
) -> None:
    broken = generator(FakeEngine())
    with pytest.raises(RuntimeError, match=problem):
        broken.load_weights(weights(*names), version=5)
    with pytest.raises(RuntimeError, match="no weights"):
        broken.generate(prompts(), Draws(0, 0), SAMPLING)


def test_new_weights_reset_the_prefix_cache_and_running_requests_forbid_it() -> None:
    engine = FakeEngine()
    ready = generator(engine)
    assert engine.cache_is_fresh
    engine.add(Request("left over", [1], 0, 1.0, 1, ()))
    with pytest.raises(RuntimeError, match="prefix cache could not be reset"):
        ready.load_weights(weights(*NAMES), version=5)


def test_an_engine_that_dies_names_its_error_and_the_unfinished_requests() -> None:
    def turn(request: Request) -> Completion:
        if request.name == "11.0.0":
            raise MemoryError("the device is full")
        return answer(request)

    engine = FakeEngine(turn)
    broken = generator(engine)
    with pytest.raises(
        RuntimeError, match=r"MemoryError: the device is full.*: 10\.0\.0, 10\.0\.1, 11\.0\.0$"
    ) as caught:
        broken.generate(prompts(), Draws(0, 0), SAMPLING)
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(RuntimeError, match="has failed before"):
        broken.generate(prompts(), Draws(0, 0), SAMPLING)
    broken.close()
    assert engine.closed_healthy is False


def test_an_engine_that_hangs_is_given_up_after_its_limit() -> None:
    release = threading.Event()

    def turn(request: Request) -> Completion:
        if request.name == "11.0.1":
            release.wait(30)
        return answer(request)

    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not done after 0.2 s .*: 10\.0\.0, 10\.0\.1, 11\.0\.0, 11\.0\.1$"):
        generator(FakeEngine(turn), limit=0.2).generate(prompts(), Draws(0, 0), SAMPLING)
    assert time.monotonic() - started < 20
    release.set()


def test_fewer_completions_than_asked_are_an_error_that_names_the_missing() -> None:
    engine = FakeEngine(lambda request: None if request.name.startswith("12") else answer(request))
    with pytest.raises(RuntimeError, match=r"returned 4 of 6 completions; unfinished requests: 12\.0\.0, 12\.0\.1"):
        generator(engine).generate(prompts(), Draws(0, 0), SAMPLING)


@pytest.mark.parametrize(
    "spoilt",
    [
        Completion("10.0.0", [], [], "stop"),
        Completion("10.0.0", [2, 3], [-1.0], "length"),
        Completion("10.0.0", [2], [-1.0], "abort"),
    ],
)
def test_a_broken_completion_is_an_error(spoilt: Completion) -> None:
    engine = FakeEngine(lambda request: spoilt if request.name == spoilt.name else answer(request))
    with pytest.raises(
        RuntimeError, match=f"request 10.0.0 ended with '{spoilt.finish_reason}', {len(spoilt.tokens)} "
    ):
        generator(engine).generate(prompts(), Draws(0, 0), SAMPLING)


def test_logprobs_that_are_not_finite_are_an_error() -> None:
    engine = FakeEngine(lambda request: Completion(request.name, [2], [float("nan")], "length"))
    with pytest.raises(RuntimeError, match="not finite"):
        generator(engine).generate(prompts(), Draws(0, 0), SAMPLING)


def test_a_prompt_that_leaves_no_room_is_refused_by_its_id() -> None:
    ready = generator(FakeEngine())
    assert len(ready.generate(prompts((5,)), Draws(0, 0), SAMPLING).completions) == 2
    with pytest.raises(ValueError, match="max_model_len = 8: prompt 11 has 6 tokens; allowed: 5"):
        ready.generate(prompts((5, 6)), Draws(0, 0), SAMPLING)


def test_a_prompt_s_own_limit_bounds_its_completions() -> None:
    engine = FakeEngine()
    sampling = Sampling(2, 0.7, 3, (STOP,), max_total_tokens=6)
    generator(engine).generate(prompts((2, 4, 5)), Draws(0, 0), sampling)
    assert [request.max_new_tokens for request in engine.asked] == [3, 3, 2, 2, 1, 1]
