import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dppo_megatron.batches import (
    FinishReason,
    PromptBatch,
    PrunedBatch,
    Purpose,
    Ragged,
    RolloutBatch,
    Sampling,
    ScoredBatch,
)
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.replay import ReplayGenerator, Sample, read_samples, samples_of, samples_path, write_samples

DRAWS = Draws(seed=1, step=12)
SAMPLING = Sampling(num_generations=2, temperature=1.0, max_new_tokens=4, stop_token_ids=(1,))
BIG_ID = -(2**62) - 1
TEXTS = ("a", "bé", "c\n", "d", "e", "f")
ADVANTAGES = np.array([0.5, -0.5, 0.0, 0.0, 1.25, -1.25])
KEEP_PROBABILITIES = np.array([0.5, 0.25, 0.0, 0.0, 1.0, 1.0])


def make_rollouts() -> RolloutBatch:
    """Three prompts, the last one the first once more; two completions each."""
    prompts = PromptBatch(
        prompt_ids=np.array([BIG_ID, 7, BIG_ID]),
        occurrences=np.array([0, 0, 1]),
        minibatches=np.array([0, 0, 1]),
        tokens=Ragged.from_rows([(3, 4), (5,), (3, 4)]),
        texts=("12=", "3=", "12="),
        answers=("12", "3", "12"),
        weights=np.array([1.0, 2.0, 1.25]),
        num_candidates=np.array([2, 1]),
    )
    completions = [(8, 1), (9, 9, 9, 9), (8, 8, 1), (1,), (6, 6, 6, 1), (6, 1)]
    return RolloutBatch(
        prompts=prompts,
        completions=Ragged.from_rows(completions),
        sampled_logprobs=-np.random.default_rng(0).exponential(size=16).astype(np.float32),
        finish_reasons=np.array([0, 1, 0, 0, 0, 0]),
        version=12,
    )


def make_scored(rollouts: RolloutBatch) -> ScoredBatch:
    return ScoredBatch(
        prompts=rollouts.prompts,
        num_generations=2,
        rewards=np.array([1.0, 0.0, 1.0, 1.0, 0.75, 0.0]),
        advantages=ADVANTAGES,
        completion_lengths=rollouts.completions.lengths,
        finish_reasons=rollouts.finish_reasons,
        surprises=rollouts.surprises,
    )


def make_plan(minibatch: int, candidates: list[int], kept: list[int]) -> PrunedBatch:
    prompt_weights = np.array([1.0, 1.0, 2.0, 2.0, 1.25, 1.25])
    return PrunedBatch(
        minibatch=minibatch,
        sequences=np.array(kept),
        weights=prompt_weights[kept] / KEEP_PROBABILITIES[kept],
        lengths=np.full(len(kept), 4),
        completion_lengths=np.full(len(kept), 2),
        advantages=ADVANTAGES[kept],
        denominator=4.0,
        candidates=np.array(candidates),
        keep_probabilities=KEEP_PROBABILITIES[candidates],
    )


PLANS = (make_plan(0, [0, 1, 2, 3], [1]), make_plan(1, [4, 5], [4, 5]))


def make_samples() -> list[Sample]:
    rollouts = make_rollouts()
    return samples_of(rollouts, scored=make_scored(rollouts), plans=PLANS, completion_texts=TEXTS)


def test_samples_state_what_was_sampled_scored_and_decided() -> None:
    samples = make_samples()
    assert samples[1] == Sample(
        prompt_id=BIG_ID,
        occurrence=0,
        completion_index=1,
        prompt="12=",
        completion="bé",
        answer="12",
        finish_reason=FinishReason.LENGTH,
        reward=0.0,
        advantage=-0.5,
        prompt_keep_probability=1.0,
        keep_probability=0.25,
        kept=True,
        weight=4.0,
        prompt_token_ids=(3, 4),
        token_ids=(9, 9, 9, 9),
        sampled_logprobs=tuple(make_rollouts().sampled_logprobs[2:6].tolist()),
    )
    assert [sample.kept for sample in samples] == [False, True, False, False, True, True]
    assert [sample.weight for sample in samples] == [0.0, 4.0, 0.0, 0.0, 1.25, 1.25]
    assert [sample.prompt_keep_probability for sample in samples] == [1.0, 1.0, 0.5, 0.5, 0.8, 0.8]


def test_shares_of_ranks_give_the_samples_of_the_whole_and_the_same_file(tmp_path: Path) -> None:
    rollouts = make_rollouts()
    shares = []
    for rank in range(2):
        prompts = np.arange(rank, 3, 2)
        rows = (prompts[:, None] * 2 + np.arange(2)).ravel()
        logprobs = Ragged(rollouts.sampled_logprobs, rollouts.completions.offsets).take(rows).values
        share = RolloutBatch(
            prompts=rollouts.prompts.take(prompts),
            completions=rollouts.completions.take(rows),
            sampled_logprobs=logprobs.astype(np.float32),
            finish_reasons=rollouts.finish_reasons[rows],
            version=12,
        )
        texts = [TEXTS[row] for row in rows]
        shares += samples_of(share, scored=make_scored(rollouts), plans=PLANS, completion_texts=texts)
    write_samples(tmp_path / "shares", shares)
    write_samples(tmp_path / "whole", make_samples())
    assert (tmp_path / "shares").read_bytes() == (tmp_path / "whole").read_bytes()


def test_samples_survive_the_file_bit_for_bit(tmp_path: Path) -> None:
    floats = np.random.default_rng(1).integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32)
    floats = floats[np.isfinite(floats)]
    sample = replace(make_samples()[0], sampled_logprobs=tuple(floats.tolist()), token_ids=(3,) * len(floats))
    samples = [sample, *make_samples()[1:]]
    path = samples_path(tmp_path, step=12)
    write_samples(path, samples)
    assert path == tmp_path / "samples" / "step_12.jsonl"
    read = read_samples(path)
    assert sorted(read, key=lambda each: each.key) == read
    assert sorted(samples, key=lambda each: each.key) == read
    kept = next(each for each in read if each.key == sample.key)
    assert np.array(kept.sampled_logprobs, np.float32).tobytes() == floats.tobytes()


def test_replay_gives_back_the_recorded_rollouts_for_any_share(tmp_path: Path) -> None:
    rollouts = make_rollouts()
    write_samples(samples_path(tmp_path, step=12), make_samples())
    for rows in (np.arange(3), np.array([2, 0]), np.zeros(0, np.int64)):
        replayed = ReplayGenerator(tmp_path).generate(rollouts.prompts.take(rows), DRAWS, SAMPLING)
        sequences = (rows[:, None] * 2 + np.arange(2)).ravel()
        expected = rollouts.completions.take(sequences)
        logprobs = Ragged(rollouts.sampled_logprobs, rollouts.completions.offsets).take(sequences)
        np.testing.assert_array_equal(replayed.completions.values, expected.values)
        np.testing.assert_array_equal(replayed.completions.offsets, expected.offsets)
        assert replayed.sampled_logprobs.tobytes() == logprobs.values.tobytes()
        np.testing.assert_array_equal(replayed.finish_reasons, rollouts.finish_reasons[sequences])
        assert replayed.version == 12


def test_replay_names_the_file_or_sample_that_is_missing(tmp_path: Path) -> None:
    prompts = make_rollouts().prompts
    replay = ReplayGenerator(tmp_path)
    with pytest.raises(RuntimeError, match=r"step_12\.jsonl does not exist"):
        replay.generate(prompts, DRAWS, SAMPLING)
    write_samples(samples_path(tmp_path, step=12), make_samples()[:-1])
    with pytest.raises(RuntimeError, match=rf"no sample of prompt {BIG_ID}, occurrence 1, completion 1"):
        replay.generate(prompts, DRAWS, SAMPLING)
    changed = replace(prompts, tokens=Ragged.from_rows([(3, 4), (6,), (3, 4)]))
    with pytest.raises(RuntimeError, match="prompt 7 was recorded with other token ids"):
        replay.generate(changed, DRAWS, SAMPLING)
    with pytest.raises(RuntimeError, match="only training rollouts are recorded, not VALIDATION"):
        replay.generate(prompts, DRAWS, replace(SAMPLING, purpose=Purpose.VALIDATION))


def test_replay_reads_the_weight_stream_to_its_end(tmp_path: Path) -> None:
    stream = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    ReplayGenerator(tmp_path).load_weights(stream, version=0)
    assert next(stream, None) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row[:-1], "not JSON"),
        (lambda row: "[1]", "list; allowed: an object"),
        (lambda row: row.replace('"kept"', '"held"'), r"missing \['kept'\], unknown \['held'\]"),
        (lambda row: row.replace('"length"', '"cut"'), "finish_reason: 'cut'; allowed: stop, length"),
        (lambda row: row.replace("[9, 9, 9, 9]", "[9, 9]"), "different lengths"),
        (lambda row: row.replace("[9, 9, 9, 9]", '[9, 9, 9, "9"]'), "token_ids: '9'; allowed: int"),
        (lambda row: row.replace("[9, 9, 9, 9]", "9"), "token_ids: 9; allowed: a list of int"),
        (lambda row: row.replace("[9, 9, 9, 9]", "[9, 9, 9, true]"), "token_ids: True; allowed: int"),
        (lambda row: row.replace('"reward": 0.0', '"reward": null'), "reward: None; allowed: float"),
    ],
)
def test_a_damaged_line_is_an_error_with_file_and_line(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "step_1.jsonl"
    write_samples(path, make_samples()[:3])
    lines = path.read_text().splitlines()
    damaged = change(lines[1])
    assert damaged != lines[1]
    path.write_text("\n".join([lines[0], damaged, lines[2]]))
    with pytest.raises(ValueError, match=rf"step_1\.jsonl:2: .*{message}"):
        read_samples(path)


def test_a_whole_float_written_without_its_point_is_read_as_a_float(tmp_path: Path) -> None:
    path = tmp_path / "step_1.jsonl"
    write_samples(path, make_samples()[:1])
    path.write_text(path.read_text().replace('"reward": 1.0', '"reward": 1'))
    reward = read_samples(path)[0].reward
    assert (reward, type(reward)) == (1.0, float)


def test_a_line_holds_the_fields_of_a_sample_and_readable_text(tmp_path: Path) -> None:
    write_samples(tmp_path / "samples", make_samples()[1:2])
    row = json.loads((tmp_path / "samples").read_text())
    assert list(row) == [field.name for field in fields(Sample)]
    assert row["finish_reason"] == "length"
    assert "bé" in (tmp_path / "samples").read_text()
