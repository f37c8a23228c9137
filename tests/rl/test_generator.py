from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dppo_megatron.batches import FinishReason, PromptBatch, Purpose, Ragged, RolloutBatch, Sampling
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.generator import EmbeddedGenerator, _cache_batches, _sample

DRAWS = Draws(seed=7, step=3)
STOP = 5
SAMPLING = Sampling(num_generations=4, temperature=1.0, max_new_tokens=6, stop_token_ids=(STOP,))
PROMPTS = ((3, 9, 4, 2, 8, 1, 6), (7,), (3, 9, 4), (10, 2, 8, 1), (3, 9, 4))


def make_config(vocab_size: int = 12, tied: bool = True) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.7,  # far from uniform, so that an error shows
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=STOP,
    )


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return make_model(make_config())


def make_model(config: Qwen3Config) -> Qwen3ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Qwen3ForCausalLM(config).eval()


def make_generator(model: Qwen3ForCausalLM, *, max_cache_tokens: int = 100_000) -> EmbeddedGenerator:
    generator = EmbeddedGenerator(
        model.config, dtype=torch.float32, device=torch.device("cpu"), max_cache_tokens=max_cache_tokens
    )
    generator.load_weights(model.named_parameters(), version=3)
    return generator


def make_prompts(rows: Sequence[Sequence[int]], occurrences: Sequence[int] | None = None) -> PromptBatch:
    size = len(rows)
    return PromptBatch(
        prompt_ids=np.array([hash(tuple(row)) for row in rows], np.int64),
        occurrences=np.array(occurrences or [0] * size, np.int64),
        minibatches=np.zeros(size, np.int64),
        tokens=Ragged.from_rows(rows),
        texts=("",) * size,
        answers=("",) * size,
        weights=np.ones(size),
        num_candidates=np.array([size]),
    )


BATCH = make_prompts(PROMPTS, occurrences=(0, 0, 0, 0, 1))


def completions(rollouts: RolloutBatch) -> list[tuple[int, ...]]:
    return [tuple(rollouts.completions[row].tolist()) for row in range(len(rollouts.completions))]


@torch.no_grad()
def reference_logprobs(
    model: Qwen3ForCausalLM, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """One plain forward pass in float64: no cache, no padding, no mask."""
    logits = model.double()(torch.tensor([[*prompt, *completion]])).logits[0] / temperature
    model.float()
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs[range(len(completion)), list(completion)].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("tied", [True, False])
def test_sampled_logprobs_equal_a_plain_forward_pass_over_the_same_tokens(temperature: float, tied: bool) -> None:
    model = make_model(make_config(tied=tied))
    rollouts = make_generator(model).generate(BATCH, DRAWS, replace(SAMPLING, temperature=temperature))
    expected = [
        reference_logprobs(model, PROMPTS[row // 4], completion, temperature)
        for row, completion in enumerate(completions(rollouts))
    ]
    assert rollouts.sampled_logprobs.dtype == np.float32
    np.testing.assert_allclose(rollouts.sampled_logprobs, np.concatenate(expected), atol=1e-5)


def test_sampled_frequencies_match_the_probabilities_of_whole_completions() -> None:
    size = 6000
    small = make_model(make_config(vocab_size=6))
    sampling = Sampling(num_generations=size, temperature=3.0, max_new_tokens=2, stop_token_ids=(STOP,))
    sampled = completions(make_generator(small).generate(make_prompts([(3, 1)]), DRAWS, sampling))
    possible = [(STOP,), *product(range(5), range(6))]
    probabilities = np.exp([reference_logprobs(small, (3, 1), each, 3.0).sum() for each in possible])
    assert probabilities.sum() == pytest.approx(1)
    counts = np.array([sampled.count(each) for each in possible])
    assert counts.sum() == size
    common = probabilities * size >= 5
    chi_square = ((counts - size * probabilities)[common] ** 2 / (size * probabilities[common])).sum()
    degrees = common.sum()
    assert degrees >= 12
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)


def test_each_token_is_sampled_on_the_interval_of_its_probability_and_an_impossible_one_never() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    uniforms = torch.tensor([0.0, 0.249, 0.251, 0.749, 0.751, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = _sample(probabilities.log().expand(6, -1), uniforms=uniforms, temperature=1.0)
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4]
    np.testing.assert_allclose(logprobs.exp(), [0.25, 0.25, 0.5, 0.5, 0.25, 0.25], rtol=1e-6)


def test_a_completion_does_not_depend_on_its_batch_or_its_order(model: Qwen3ForCausalLM) -> None:
    whole = make_generator(model).generate(BATCH, DRAWS, SAMPLING)
    expected = completions(whole)
    order = np.array([3, 0, 4, 2, 1])
    permuted = completions(make_generator(model).generate(BATCH.take(order), DRAWS, SAMPLING))
    assert permuted == [expected[4 * prompt + index] for prompt in order for index in range(4)]
    alone = [make_generator(model).generate(BATCH.share(rank=rank, size=5), DRAWS, SAMPLING) for rank in range(5)]
    assert [completion for each in alone for completion in completions(each)] == expected
    # 26 tokens hold two of the longest sequences: groups are split between batches.
    split = make_generator(model, max_cache_tokens=26).generate(BATCH, DRAWS, SAMPLING)
    assert completions(split) == expected
    np.testing.assert_allclose(split.sampled_logprobs, whole.sampled_logprobs, atol=1e-5)


def test_groups_occurrences_steps_and_purposes_have_streams_of_their_own(model: Qwen3ForCausalLM) -> None:
    generator = make_generator(model)
    prompts = make_prompts([(3, 9, 4), (3, 9, 4)], occurrences=(0, 1))
    base = completions(generator.generate(prompts, DRAWS, SAMPLING))
    assert base == completions(generator.generate(prompts, DRAWS, SAMPLING))
    assert len(set(base[:4])) > 1
    assert base[:4] != base[4:]
    assert base != completions(generator.generate(prompts, Draws(seed=7, step=4), SAMPLING))
    validation = replace(SAMPLING, purpose=Purpose.VALIDATION)
    assert base != completions(generator.generate(prompts, DRAWS, validation))


def test_completions_end_on_the_first_stop_token_or_at_the_limit(model: Qwen3ForCausalLM) -> None:
    sampling = replace(SAMPLING, num_generations=40, temperature=1.5, stop_token_ids=(STOP, 2))
    rollouts = make_generator(model).generate(BATCH, DRAWS, sampling)
    unstopped = make_generator(model).generate(BATCH, DRAWS, replace(sampling, stop_token_ids=()))
    assert set(rollouts.finish_reasons.tolist()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert (unstopped.completions.lengths == 6).all()
    assert (unstopped.finish_reasons == FinishReason.LENGTH).all()
    for row, tokens in enumerate(completions(unstopped)):
        stops = [place for place, token in enumerate(tokens) if token in (STOP, 2)]
        expected = tokens[: stops[0] + 1] if stops else tokens
        assert tuple(rollouts.completions[row].tolist()) == expected
        assert rollouts.finish_reasons[row] == (FinishReason.STOP if stops else FinishReason.LENGTH)


def test_prompt_and_completion_together_stay_below_the_total(model: Qwen3ForCausalLM) -> None:
    unbounded = make_generator(model).generate(BATCH, DRAWS, replace(SAMPLING, stop_token_ids=()))
    bounded = make_generator(model).generate(BATCH, DRAWS, replace(SAMPLING, stop_token_ids=(), max_total_tokens=8))
    rooms = [min(6, 8 - len(row)) for row in PROMPTS for _ in range(4)]
    assert bounded.completions.lengths.tolist() == rooms
    assert set(bounded.finish_reasons.tolist()) == {FinishReason.LENGTH}
    whole = completions(unbounded)
    assert completions(bounded) == [row[:room] for row, room in zip(whole, rooms, strict=True)]


def test_greedy_equals_greedy_of_hugging_face(model: Qwen3ForCausalLM) -> None:
    sampling = replace(SAMPLING, num_generations=2, temperature=0.0)
    rollouts = make_generator(model).generate(BATCH, DRAWS, sampling)
    hugging_face: Any = model  # its generate is typed for a protocol that the class does not match
    for row, completion in enumerate(completions(rollouts)):
        prompt = PROMPTS[row // 2]
        tokens = torch.tensor([prompt])
        output = hugging_face.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=6
        )
        assert completion == tuple(output[0, len(prompt) :].tolist())
        logprobs = rollouts.sampled_logprobs[rollouts.completions.offsets[row] :][: len(completion)]
        np.testing.assert_allclose(logprobs, reference_logprobs(model, prompt, completion), atol=1e-5)


def test_an_empty_share_gives_empty_rollouts(model: Qwen3ForCausalLM) -> None:
    rollouts = make_generator(model).generate(BATCH.take(np.zeros(0, np.int64)), DRAWS, SAMPLING)
    assert len(rollouts.completions) == len(rollouts.prompts) == len(rollouts.sampled_logprobs) == 0
    assert rollouts.version == 3


def test_new_weights_change_the_next_completions_and_the_version(model: Qwen3ForCausalLM) -> None:
    generator = make_generator(model)
    before = generator.generate(BATCH, DRAWS, SAMPLING)
    doubled = ((name, 2 * parameter) for name, parameter in model.named_parameters())
    generator.load_weights(doubled, version=4)
    after = generator.generate(BATCH, DRAWS, SAMPLING)
    assert completions(after) != completions(before)
    assert (before.version, after.version) == (3, 4)


def test_a_tied_head_in_the_stream_is_ignored(model: Qwen3ForCausalLM) -> None:
    generator = make_generator(model)
    expected = completions(generator.generate(BATCH, DRAWS, SAMPLING))
    stream = [*model.named_parameters(), ("lm_head.weight", torch.zeros(12, 16))]
    generator.load_weights(stream, version=3)
    assert completions(generator.generate(BATCH, DRAWS, SAMPLING)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stream: stream[1:], "nothing came for model.embed_tokens.weight"),
        (lambda stream: [*stream, ("model.extra.weight", torch.zeros(1))], "model.extra.weight is unknown"),
        (lambda stream: [*stream, stream[0]], "model.embed_tokens.weight .*came twice"),
        (lambda stream: [("model.norm.weight", torch.zeros(3)), *stream], r"norm.weight has shape \(3,\).*\(16,\)"),
    ],
)
def test_a_wrong_weight_stream_is_refused_by_name_and_leaves_no_weights(model, change, message: str) -> None:
    generator = make_generator(model)
    with pytest.raises(RuntimeError, match=message):
        generator.load_weights(change(list(model.named_parameters())), version=4)
    with pytest.raises(RuntimeError, match="no weights"):
        generator.generate(BATCH, DRAWS, SAMPLING)


def test_logits_that_are_not_finite_are_refused(model: Qwen3ForCausalLM) -> None:
    generator = make_generator(model)
    broken = ((name, parameter * float("nan")) for name, parameter in model.named_parameters())
    generator.load_weights(broken, version=9)
    with pytest.raises(RuntimeError, match=r"not finite.*version 9"):
        generator.generate(BATCH, DRAWS, SAMPLING)


def test_a_sequence_that_exceeds_the_cache_is_refused(model: Qwen3ForCausalLM) -> None:
    generator = make_generator(model, max_cache_tokens=12)
    with pytest.raises(ValueError, match="max_cache_tokens: 12; allowed: at least 13"):
        generator.generate(BATCH, DRAWS, SAMPLING)


def test_cache_batches_cover_every_sequence_once_within_the_cache() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    batches = list(_cache_batches(lengths, max_cache_tokens=100))
    assert sorted(np.concatenate(batches)) == list(range(200))
    assert all(len(batch) * lengths[batch].max() <= 100 for batch in batches)


def test_building_the_engine_leaves_the_configuration_alone() -> None:
    config = make_config()
    before = config.to_dict()
    EmbeddedGenerator(config, dtype=torch.bfloat16, device=torch.device("cpu"), max_cache_tokens=100)
    assert config.to_dict() == before
