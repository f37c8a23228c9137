"""Recorded samples: one schema for people, for reports and for training again without an engine."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
from torch import Tensor

from dppo_megatron.atomic_file import atomic_write_text
from dppo_megatron.batches import (
    FinishReason,
    FloatArray,
    PromptBatch,
    PrunedBatch,
    Purpose,
    Ragged,
    RolloutBatch,
    Sampling,
    ScoredBatch,
)
from dppo_megatron.rl.draws import Draws


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of a step: what was sampled, how it was scored, whether and how heavily it was trained on.

    completion_index: place in its group. sampled_logprobs: float32 values, one a token of ``token_ids``.
    prompt_keep_probability, keep_probability: p_q and p_o. weight: 1 / (p_q * p_o), 0 where not kept.
    finish_reason: in a file its name, ``stop`` or ``length``. prompt, completion, answer: for people.
    """

    prompt_id: int
    occurrence: int
    completion_index: int
    prompt: str
    completion: str
    answer: str
    finish_reason: FinishReason
    reward: float
    advantage: float
    prompt_keep_probability: float
    keep_probability: float
    kept: bool
    weight: float
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.sampled_logprobs)

    @property
    def key(self) -> tuple[int, int, int]:
        """What names the sample within its step: prompt id, occurrence, index in the group."""
        return self.prompt_id, self.occurrence, self.completion_index


def samples_path(directory: Path, *, step: int) -> Path:
    """The file of one step's samples in a record's directory."""
    return directory / "samples" / f"step_{step}.jsonl"


def samples_of(
    rollouts: RolloutBatch,
    *,
    scored: ScoredBatch,
    plans: Sequence[PrunedBatch],
    completion_texts: Sequence[str],
) -> list[Sample]:
    """One sample a sequence of this rank's rollouts, in their order.

    scored, plans: of the whole step, every mini-batch's plan. completion_texts: [N], of the rollouts.
    """
    keep_probabilities, weights = _decisions(scored, plans=plans)
    prompts, size = rollouts.prompts, scored.num_generations
    rows_by_prompt = {
        key: row
        for row, key in enumerate(
            zip(scored.prompts.prompt_ids.tolist(), scored.prompts.occurrences.tolist(), strict=True)
        )
    }
    samples = []
    for sequence, text in enumerate(completion_texts):
        prompt, completion_index = divmod(sequence, size)
        key = int(prompts.prompt_ids[prompt]), int(prompts.occurrences[prompt])
        row = rows_by_prompt[key] * size + completion_index
        tokens = slice(rollouts.completions.offsets[sequence], rollouts.completions.offsets[sequence + 1])
        samples.append(
            Sample(
                prompt_id=key[0],
                occurrence=key[1],
                completion_index=completion_index,
                prompt=prompts.texts[prompt],
                completion=text,
                answer=prompts.answers[prompt],
                finish_reason=FinishReason(rollouts.finish_reasons[sequence]),
                reward=float(scored.rewards[row]),
                advantage=float(scored.advantages[row]),
                prompt_keep_probability=float(1 / prompts.weights[prompt]),
                keep_probability=float(keep_probabilities[row]),
                kept=bool(weights[row] > 0),
                weight=float(weights[row]),
                prompt_token_ids=tuple(prompts.tokens[prompt].tolist()),
                token_ids=tuple(rollouts.completions.values[tokens].tolist()),
                sampled_logprobs=tuple(rollouts.sampled_logprobs[tokens].tolist()),
            )
        )
    return samples


def _decisions(scored: ScoredBatch, *, plans: Sequence[PrunedBatch]) -> tuple[FloatArray, FloatArray]:
    """p_o and weight of each sequence of the step, float64 [N] each; the weight is 0 where not kept."""
    keep_probabilities, weights = np.full(len(scored), np.nan), np.zeros(len(scored))
    for plan in plans:
        keep_probabilities[plan.candidates] = plan.keep_probabilities
        weights[plan.sequences] = plan.weights
    assert not np.isnan(keep_probabilities).any(), "a sequence that no plan decided on"
    return keep_probabilities, weights


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write one JSON object a line, at once, sorted by key: the same file on every layout.

    A float32 is written as the float64 of the same value, and so comes back bit for bit.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [_to_line(sample) for sample in sorted(samples, key=lambda sample: sample.key)]
    atomic_write_text(path, "".join(f"{line}\n" for line in lines))


def _to_line(sample: Sample) -> str:
    values = {field.name: getattr(sample, field.name) for field in fields(sample)}
    values["finish_reason"] = sample.finish_reason.name.lower()
    return json.dumps(values, allow_nan=False, ensure_ascii=False)


def read_samples(path: Path) -> list[Sample]:
    """Read what ``write_samples`` wrote.

    Raises: ValueError with file and line for a line that is not a sample. OSError for a file not readable.
    """
    return list(iterate_samples(path))


def iterate_samples(path: Path) -> Iterator[Sample]:
    """The same one by one, for readers who stop early or keep little."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            yield _parse(line, where=f"{path}:{number}")


def _parse(line: str, *, where: str) -> Sample:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {type(values).__name__}; allowed: an object")
    names = {field.name for field in fields(Sample)}
    if values.keys() != names:
        problems = [f"missing {sorted(names - values.keys())}"] if names - values.keys() else []
        problems += [f"unknown {sorted(values.keys() - names)}"] if values.keys() - names else []
        raise ValueError(f"{where}: fields {', '.join(problems)}")
    for field in fields(Sample):
        values[field.name] = _checked(values[field.name], kind=field.type, where=f"{where}: {field.name}")
    if len(values["token_ids"]) != len(values["sampled_logprobs"]):
        raise ValueError(f"{where}: token_ids and sampled_logprobs have different lengths")
    return Sample(**values)


def _checked(value: Any, *, kind: Any, where: str) -> Any:
    """A field's value as its kind; the kinds are those that Sample uses."""
    if kind is FinishReason:
        names = [reason.name.lower() for reason in FinishReason]
        if value not in names:
            raise ValueError(f"{where}: {value!r}; allowed: {', '.join(names)}")
        return FinishReason(names.index(value))
    if elements := get_args(kind):
        if not isinstance(value, list):
            raise ValueError(f"{where}: {value!r}; allowed: a list of {elements[0].__name__}")
        return tuple([_checked(item, kind=elements[0], where=where) for item in value])
    # By type, because a bool is an int; a whole float may have lost its point in another tool.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{where}: {value!r}; allowed: {kind.__name__}")
    return kind(value)


class ReplayGenerator:
    """A generator that answers from the samples of a recorded run, step by step, under any weights."""

    tensor_parallel_size = 1

    def __init__(self, directory: Path) -> None:
        """Replay from ``directory``, which holds ``samples/step_N.jsonl``."""
        self._directory = directory

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Read the stream to its end, for the collectives in it, and use nothing of it."""
        for _ in weights:
            pass

    def generate(self, prompts: PromptBatch, draws: Draws, sampling: Sampling) -> RolloutBatch:
        """Look the completions up in the file of step ``draws.step``.

        Raises: RuntimeError for a file or sample that is missing, a prompt whose tokens have changed, or a
        purpose that is not recorded (all but GENERATION).
        """
        if sampling.purpose is not Purpose.GENERATION:
            raise RuntimeError(f"replay: only training rollouts are recorded, not {sampling.purpose.name}")
        path = samples_path(self._directory, step=draws.step)
        if not path.is_file():
            raise RuntimeError(f"replay: {path} does not exist: step {draws.step} was not recorded there")
        recorded = {sample.key: sample for sample in read_samples(path)}
        samples = []
        for prompt in range(len(prompts)):
            tokens = tuple(prompts.tokens[prompt].tolist())
            for completion_index in range(sampling.num_generations):
                key = int(prompts.prompt_ids[prompt]), int(prompts.occurrences[prompt]), completion_index
                sample = recorded.get(key)
                if sample is None:
                    raise RuntimeError(
                        f"replay: {path} has no sample of prompt {key[0]}, occurrence {key[1]}, completion {key[2]}"
                    )
                if sample.prompt_token_ids != tokens:
                    raise RuntimeError(f"replay: {path}: prompt {key[0]} was recorded with other token ids")
                samples.append(sample)
        logprobs = [np.array(sample.sampled_logprobs, np.float32) for sample in samples]
        return RolloutBatch(
            prompts=prompts,
            completions=Ragged.from_rows([sample.token_ids for sample in samples]),
            sampled_logprobs=np.concatenate([np.zeros(0, np.float32), *logprobs]),
            finish_reasons=np.array([sample.finish_reason for sample in samples], np.int64),
            version=draws.step,
        )

    def close(self) -> None:
        """Nothing: no file stays open."""
