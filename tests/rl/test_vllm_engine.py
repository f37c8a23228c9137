"""vLLM itself, on a CPU, against the Hugging Face model; skipped where vLLM is not installed (make test-vllm)."""

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import FinishReason, PromptBatch, Ragged, RolloutBatch, Sampling
from dppo_megatron.config.generation_schema import GenerationConfig, VllmConfig
from dppo_megatron.parallel.hf_names import streamed_names
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.vllm_engine import VllmEngine
from dppo_megatron.rl.vllm_generator import VllmGenerator

pytest.importorskip("vllm")

VOCABULARY, BLOCK, LONG = 512, 32, 80
CONFIG = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    initializer_range=0.1,
)
GREEDY = Sampling(num_generations=1, temperature=0.0, max_new_tokens=12, stop_token_ids=(VOCABULARY - 1,))
SAMPLED = replace(GREEDY, num_generations=4, temperature=0.7)


@dataclass(frozen=True)
class Process:
    """What the engine's construction must not change."""

    preload: str | None
    torch_state: Tensor
    numpy_draw: float
    python_draw: float
    affinity: frozenset[int]
    threads: int

    @classmethod
    def now(cls) -> "Process":
        numpy_state, python_state = np.random.get_state(), random.getstate()
        drawn = cls(
            os.environ.get("LD_PRELOAD"),
            torch.get_rng_state(),
            float(np.random.random()),
            random.random(),
            frozenset(os.sched_getaffinity(0)),
            torch.get_num_threads(),
        )
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        return drawn


@dataclass(frozen=True)
class Started:
    """A generator, its engine, and the process before and after they were built."""

    generator: VllmGenerator
    engine: VllmEngine
    before: Process
    after: Process


def generation(**options: object) -> GenerationConfig:
    vllm_cfg = VllmConfig(precision="float32", max_model_len=128)
    return GenerationConfig(max_new_tokens=12, vllm_cfg=vllm_cfg, vllm_kwargs={"block_size": BLOCK, **options})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vllm") / "model"
    new_model(0).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def started(source: Path) -> Iterator[Started]:
    device.start_process_group()
    architecture = read_architecture(CONFIG.to_dict())
    before = Process.now()
    engine = VllmEngine(source, architecture=architecture, generation=generation(), max_cache_tokens=16_384)
    after = Process.now()
    generator = VllmGenerator(
        engine,
        weight_names=streamed_names(architecture),
        max_model_len=128,
        time_limit_seconds=300.0,
        pool=lambda mine: [mine],
        engine_rank=0,
        tensor_parallel_size=1,
    )
    yield Started(generator, engine, before, after)
    generator.close()
    assert torch.distributed.is_initialized()
    torch.distributed.destroy_process_group()


def new_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(CONFIG).float().eval()


def weights(model: Qwen3ForCausalLM) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
    yield "lm_head.weight", model.lm_head.weight.detach()


def prompts(lengths: Sequence[int] = (3, 9, 1, LONG)) -> PromptBatch:
    stream = np.random.default_rng(7)
    size = len(lengths)
    return PromptBatch(
        prompt_ids=np.arange(size),
        occurrences=np.zeros(size, np.int64),
        minibatches=np.zeros(size, np.int64),
        tokens=Ragged.from_rows([stream.integers(0, VOCABULARY, length).tolist() for length in lengths]),
        texts=("",) * size,
        answers=("",) * size,
        weights=np.ones(size),
        num_candidates=np.array([size]),
    )


@torch.no_grad()
def greedy(model: Qwen3ForCausalLM, batch: PromptBatch, sampling: Sampling = GREEDY) -> list[list[int]]:
    """Greedy completions by whole forward passes, without a cache."""
    completions = []
    for row in range(len(batch)):
        ids, start = batch.tokens[row].tolist(), len(batch.tokens[row])
        while len(ids) - start < sampling.max_new_tokens and (
            len(ids) == start or ids[-1] not in sampling.stop_token_ids
        ):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        completions.append(ids[start:])
    return completions


def rows(rollouts: RolloutBatch) -> list[list[int]]:
    return [rollouts.completions[row].tolist() for row in range(len(rollouts.completions))]


def test_building_an_engine_leaves_the_process_as_it_was(started: Started) -> None:
    before, after = started.before, started.after
    assert torch.equal(before.torch_state, after.torch_state)
    assert replace(before, torch_state=after.torch_state) == after
    torch.set_num_threads(before.threads + 1)
    assert torch.get_num_threads() == before.threads + 1
    torch.set_num_threads(before.threads)


def test_greedy_completions_are_those_of_hugging_face_after_each_update(started: Started) -> None:
    seen = []
    for version in range(1, 6):
        model = new_model(version)
        started.generator.load_weights(weights(model), version=version)
        rollouts = started.generator.generate(prompts(), Draws(0, version), GREEDY)
        assert rows(rollouts) == greedy(model, prompts())
        assert rollouts.version == version
        seen.append(rows(rollouts))
    assert all(one != other for one, other in itertools.pairwise(seen))


def test_a_tied_stream_without_lm_head_would_leave_a_cpu_with_the_old_output_layer(started: Started) -> None:
    started.generator.load_weights(weights(new_model(1)), version=1)
    model = new_model(2)
    started.engine.reload((name, tensor) for name, tensor in weights(model) if name != "lm_head.weight")
    started.engine.reset_prefix_cache()
    assert rows(started.generator.generate(prompts(), Draws(0, 0), GREEDY)) != greedy(model, prompts())


def test_without_a_reset_the_prefix_cache_would_serve_the_old_policy(started: Started) -> None:
    batch = prompts((LONG, LONG))
    started.generator.load_weights(weights(new_model(1)), version=1)
    started.generator.generate(batch, Draws(0, 0), GREEDY)
    model = new_model(2)
    started.engine.reload(weights(model))
    assert rows(started.generator.generate(batch, Draws(0, 0), GREEDY)) != greedy(model, batch)
    started.generator.load_weights(weights(model), version=2)
    assert rows(started.generator.generate(batch, Draws(0, 0), GREEDY)) == greedy(model, batch)


def test_a_completion_depends_on_its_key_and_not_on_its_batch(started: Started) -> None:
    started.generator.load_weights(weights(new_model(3)), version=3)
    whole = rows(started.generator.generate(prompts(), Draws(5, 6), SAMPLED))
    alone = rows(started.generator.generate(prompts().take(np.array([1])), Draws(5, 6), SAMPLED))
    assert alone == whole[4:8]
    assert len({tuple(row) for row in whole}) == len(whole)
    assert rows(started.generator.generate(prompts(), Draws(5, 7), SAMPLED)) != whole


def test_logprobs_are_those_of_the_sampling_distribution(started: Started) -> None:
    model = new_model(4)
    started.generator.load_weights(weights(model), version=4)
    batch = prompts()
    rollouts = started.generator.generate(batch, Draws(0, 0), SAMPLED)
    expected = []
    for row, completion in enumerate(rows(rollouts)):
        prompt = batch.tokens[row // SAMPLED.num_generations].tolist()
        ids = torch.tensor([*prompt, *completion])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].double()
        logprobs = torch.log_softmax(logits / SAMPLED.temperature, -1)
        expected.append(logprobs.gather(1, ids[len(prompt) :, None]).squeeze(1))
    np.testing.assert_allclose(rollouts.sampled_logprobs, torch.cat(expected).numpy(), atol=2e-4)


def test_a_stop_token_belongs_to_its_completion_and_the_limit_cuts_the_rest(started: Started) -> None:
    model = new_model(5)
    started.generator.load_weights(weights(model), version=5)
    free = greedy(model, prompts())
    sampling = replace(GREEDY, stop_token_ids=(free[0][4],))
    rollouts = started.generator.generate(prompts(), Draws(0, 0), sampling)
    assert rows(rollouts) == greedy(model, prompts(), sampling)
    assert rows(rollouts)[0] == free[0][: free[0].index(free[0][4]) + 1]
    ends = [FinishReason.STOP if row[-1] == free[0][4] else FinishReason.LENGTH for row in rows(rollouts)]
    assert rollouts.finish_reasons.tolist() == ends
    at_once = replace(GREEDY, stop_token_ids=tuple(range(VOCABULARY)))
    rollouts = started.generator.generate(prompts(), Draws(0, 0), at_once)
    assert rollouts.completions.lengths.tolist() == [1] * 4
    assert set(rollouts.finish_reasons) == {FinishReason.STOP}


def test_fifty_updates_keep_the_memory_flat(started: Started) -> None:
    model = new_model(6)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    process, resident = psutil.Process(), []
    for version in range(60):
        started.generator.load_weights(((name, tensor.clone()) for name, tensor in weights(model)), version=version)
        resident.append(process.memory_info().rss)
    assert resident[-1] - resident[9] < 2 * size, "fifty updates must not keep what two hold"


def another_generator(started: Started, *, limit: float) -> VllmGenerator:
    """Over the same engine, because what failed once stays so."""
    generator = VllmGenerator(
        started.engine,
        weight_names=streamed_names(read_architecture(CONFIG.to_dict())),
        max_model_len=128,
        time_limit_seconds=limit,
        pool=lambda mine: [mine],
        engine_rank=0,
        tensor_parallel_size=1,
    )
    generator.load_weights(weights(new_model(7)), version=7)
    return generator


def test_an_engine_that_is_too_slow_is_an_error_that_names_the_requests(started: Started) -> None:
    generator = another_generator(started, limit=1e-3)
    with pytest.raises(RuntimeError, match=r"was not done after 0.001 s .*; unfinished requests: 0\.0\.0"):
        generator.generate(prompts(), Draws(0, 0), GREEDY)
    with pytest.raises(RuntimeError, match="has failed before"):
        generator.generate(prompts(), Draws(0, 0), GREEDY)
    # Its thread ends behind the step that it is in; then the engine is free for others.
    generator._thread.close()
    generator._thread.join()
    started.engine._engine.abort_request([f"{row}.0.0" for row in range(4)])


def test_an_engine_whose_model_breaks_is_an_error_with_its_own_words(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = started.engine._engine.engine_core.engine_core.model_executor

    def break_down(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(executor, "execute_model", break_down)
    generator = another_generator(started, limit=60.0)
    with pytest.raises(RuntimeError, match=r"out of memory, say; unfinished requests: 0\.0\.0"):
        generator.generate(prompts(), Draws(0, 0), GREEDY)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tensor_parallel_size": 4}, "vllm_kwargs.tensor_parallel_size = 4: the trainer sets it"),
        ({"gpu_memory_utilisation": 0.5}, "vllm_kwargs.gpu_memory_utilisation = 0.5: vLLM has no such"),
    ],
)
def test_an_engine_option_that_is_not_the_user_s_to_set_is_refused(
    source: Path, options: dict[str, object], problem: str
) -> None:
    architecture = read_architecture(CONFIG.to_dict())
    with pytest.raises(ValueError, match=problem):
        VllmEngine(source, architecture=architecture, generation=generation(**options), max_cache_tokens=1024)


def test_what_a_cpu_cannot_run_is_refused_by_name(source: Path) -> None:
    architecture = read_architecture(CONFIG.to_dict())
    with pytest.raises(ValueError, match="head_dim = 16; vLLM's attention on CPUs has 32, 64"):
        VllmEngine(
            source, architecture=replace(architecture, head_dim=16), generation=generation(), max_cache_tokens=1024
        )
    fp8 = replace(generation(), vllm_cfg=VllmConfig(precision="fp8", max_model_len=128))
    with pytest.raises(ValueError, match="'fp8': needs a GPU"):
        VllmEngine(source, architecture=architecture, generation=fp8, max_cache_tokens=1024)
