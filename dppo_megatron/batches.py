"""The records that flow between the stages of a step.

Shape letters: C candidate prompts, P kept prompts, G completions a prompt, N = P * G sequences,
K kept sequences, S sequences in a row, T tokens, M mini-batches (optimizer steps a rollout batch).

    PromptBatch -> RolloutBatch -> ScoredBatch -> PrunedBatch -> RowPlan -> PackedRow -> TrainStats

Everything before PackedRow is numpy on the host; PackedRow holds tensors on the training device.
Sequence n of a scored batch is completion n % G of prompt n // G.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Purpose(IntEnum):
    """What a stream is for; streams of different purposes are independent."""

    SHUFFLE = 1
    PROMPT_PRUNING = 2
    COMPLETION_PRUNING = 3
    GENERATION = 4
    VALIDATION = 5
    AUDIT = 6
    SPLIT = 7


class FinishReason(IntEnum):
    """Why a completion ended."""

    STOP = 0  # a stop token was sampled; it belongs to the completion
    LENGTH = 1  # cut at the limit of new tokens


@dataclass(frozen=True, slots=True)
class Ragged:
    """Variable-length rows, flat: row n is ``values[offsets[n]:offsets[n + 1]]``.

    values: [T], any dtype; offsets: int64 [N + 1], from 0 to T, never falling.
    """

    values: NDArray[np.generic]
    offsets: IntArray

    def __post_init__(self) -> None:
        assert self.offsets.ndim == 1
        assert self.offsets[0] == 0
        assert self.offsets[-1] == len(self.values)

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]], dtype: type[np.generic] = np.int32) -> "Ragged":
        """Flatten a list of rows."""
        arrays = [np.asarray(row, dtype) for row in rows]
        return cls.from_lengths(
            np.concatenate(arrays) if arrays else np.zeros(0, dtype),
            np.array([len(array) for array in arrays], np.int64),
        )

    @classmethod
    def from_lengths(cls, values: NDArray[np.generic], lengths: IntArray) -> "Ragged":
        """Wrap flat values [T] of rows with the given lengths [N]."""
        return cls(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.generic]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> IntArray:
        """Row lengths, int64 [N]."""
        return np.diff(self.offsets)

    def take(self, rows: IntArray) -> "Ragged":
        """The given rows, in the given order (repeats allowed), without a Python loop."""
        lengths = self.lengths[rows]
        result = Ragged.from_lengths(np.zeros(0, self.values.dtype), np.zeros(0, np.int64))
        if not len(rows):
            return result
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        source = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return Ragged.from_lengths(self.values[source], lengths)


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts of one step, and what their weights and denominators need.

    prompt_ids: int64 [P], hash of the content, the key of the history.
    occurrences: int64 [P], how many times the same prompt stands earlier among this step's candidates.
    minibatches: int64 [P], the optimizer step (0 .. M - 1) that each prompt was assigned to before pruning.
    tokens: P rows of token ids. texts, answers: [P], for rewards and for people.
    weights: float64 [P], 1 / p_q of prompt pruning; 1 before it.
    num_candidates: int64 [M], candidates of each mini-batch before pruning.
    """

    prompt_ids: IntArray
    occurrences: IntArray
    minibatches: IntArray
    tokens: Ragged
    texts: tuple[str, ...]
    answers: tuple[str, ...]
    weights: FloatArray
    num_candidates: IntArray

    def __post_init__(self) -> None:
        sizes = {len(field) for field in (self.prompt_ids, self.occurrences, self.minibatches, self.tokens)}
        sizes |= {len(field) for field in (self.texts, self.answers, self.weights)}
        assert len(sizes) == 1, f"fields of different lengths: {sorted(sizes)}"
        assert (self.weights >= 1).all()

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def take(self, rows: IntArray) -> "PromptBatch":
        """The given prompts; num_candidates stays that of the whole step."""
        return PromptBatch(
            prompt_ids=self.prompt_ids[rows],
            occurrences=self.occurrences[rows],
            minibatches=self.minibatches[rows],
            tokens=self.tokens.take(rows),
            texts=tuple(self.texts[row] for row in rows),
            answers=tuple(self.answers[row] for row in rows),
            weights=self.weights[rows],
            num_candidates=self.num_candidates,
        )

    def share(self, *, rank: int, size: int) -> "PromptBatch":
        """The prompts that rank ``rank`` of ``size`` generates for: every size-th one."""
        return self.take(np.arange(rank, len(self), size))

    def with_weights(self, weights: FloatArray) -> "PromptBatch":
        """The same prompts with other weights [P]."""
        return replace(self, weights=weights)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are sampled.

    num_generations: G. temperature: 0 is greedy. max_new_tokens: the stop token included.
    stop_token_ids: sampling one ends the completion and belongs to it. purpose: the random stream.
    max_total_tokens: bounds prompt and completion together; None does not.
    """

    num_generations: int
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    purpose: Purpose = Purpose.GENERATION
    max_total_tokens: int | None = None

    def new_token_limits(self, prompt_lengths: IntArray) -> IntArray:
        """Tokens that a completion of each prompt may have, at least 1; tokens, [P] -> int64 [P]."""
        if self.max_total_tokens is None:
            return np.full(len(prompt_lengths), self.max_new_tokens, np.int64)
        limits = np.minimum(self.max_new_tokens, self.max_total_tokens - prompt_lengths)
        assert (limits > 0).all(), "a prompt that leaves no room is dropped when the data is read"
        return limits


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Completions, prompt-major: completion g of prompt p is row p * G + g.

    completions: N rows of sampled token ids (a sampled stop token included).
    sampled_logprobs: float32, one a completion token, natural log, under the sampling distribution.
    finish_reasons: int64 [N], values of FinishReason. version: the weights that sampled.
    """

    prompts: PromptBatch
    completions: Ragged
    sampled_logprobs: NDArray[np.float32]
    finish_reasons: IntArray
    version: int

    def __post_init__(self) -> None:
        assert len(self.completions) == len(self.finish_reasons)
        assert len(self.sampled_logprobs) == len(self.completions.values)
        assert not len(self.prompts) or len(self.completions) % len(self.prompts) == 0
        assert (self.completions.lengths > 0).all(), "a completion has at least one token"

    @property
    def surprises(self) -> FloatArray:
        """Of each completion the root of the sum over its tokens of (1 - probability of the token)^2, float64 [N]."""
        squares = np.expm1(self.sampled_logprobs.astype(np.float64)) ** 2
        return np.sqrt(np.add.reduceat(squares, self.completions.offsets[:-1])) if len(squares) else squares


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Every kept prompt's completions as numbers, on every rank: all that pruning may look at.

    prompts: all P kept prompts of the step. num_generations: G.
    rewards, advantages: float64 [N]. completion_lengths: int64 [N], tokens. finish_reasons: int64 [N].
    Advantages come from whole groups, before any completion is dropped.
    surprises: float64 [N], ``RolloutBatch.surprises``.
    owners: int64 [P], the generating rank that holds each prompt's completions; None: dealt out in turn.
    num_failures: answers of all ranks that got no verdict.
    """

    prompts: PromptBatch
    num_generations: int
    rewards: FloatArray
    advantages: FloatArray
    completion_lengths: IntArray
    finish_reasons: IntArray
    surprises: FloatArray
    owners: IntArray | None = None
    num_failures: int = 0

    def __post_init__(self) -> None:
        sizes = {len(self.rewards), len(self.advantages), len(self.completion_lengths)}
        assert sizes == {len(self.prompts) * self.num_generations}
        assert len(self.finish_reasons) == len(self.surprises) == len(self.rewards)

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def prompt_rows(self) -> IntArray:
        """Row of each sequence's prompt in ``prompts``, int64 [N]."""
        return np.arange(len(self), dtype=np.int64) // self.num_generations

    @property
    def completion_indices(self) -> IntArray:
        """Index of each sequence in its group, int64 [N]."""
        return np.arange(len(self), dtype=np.int64) % self.num_generations


@dataclass(frozen=True, slots=True)
class PrunedBatch:
    """The sequences that one optimizer step trains on.

    sequences: int64 [K], rows of the scored batch, rising. weights: float64 [K], 1 / (p_q * p_o).
    lengths: int64 [K], prompt and completion tokens. completion_lengths: int64 [K]. advantages: float64 [K].
    denominator: what the sum of weighted sequence terms is divided by; that of the unpruned mini-batch.
    candidates: int64 [N_m], the mini-batch's sequences; keep_probabilities: float64 [N_m], their p_o.
    """

    minibatch: int
    sequences: IntArray
    weights: FloatArray
    lengths: IntArray
    completion_lengths: IntArray
    advantages: FloatArray
    denominator: float
    candidates: IntArray
    keep_probabilities: FloatArray

    def __post_init__(self) -> None:
        sizes = {len(self.sequences), len(self.weights), len(self.lengths), len(self.advantages)}
        assert len(sizes) == 1
        assert len(self.candidates) == len(self.keep_probabilities)
        assert self.denominator > 0
        assert (self.weights >= 1).all()

    def __len__(self) -> int:
        return len(self.sequences)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which sequences stand in which THD row of which data-parallel rank, the same plan on every rank.

    rows: [DP][k], each an int64 array of indices into a PrunedBatch (empty for a row of padding alone);
    every data-parallel rank has the same number k of rows.
    sequence_multiple, row_multiple: what each sequence and each row is padded to, tokens.
    num_packed: rows that held all sequences before they were shared out.
    """

    rows: tuple[tuple[IntArray, ...], ...]
    sequence_multiple: int
    row_multiple: int
    num_packed: int

    def __post_init__(self) -> None:
        assert len({len(rows) for rows in self.rows}) == 1, "ranks with different numbers of rows"

    @property
    def num_rows(self) -> int:
        """Rows (micro-batches) of each data-parallel rank."""
        return len(self.rows[0])


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One micro-batch in THD format: sequences end to end, as this context-parallel rank sees them.

    All tensors [T] hold this rank's tokens (T = padded row / CP); position t predicts ``labels[t]``.
    token_ids, labels, positions: int64. coefficients: float32, the weight of the token's loss term: zero
    where the label is not a sampled token, else w_i (token mean) or w_i / completion length (sequence mean).
    advantages, sampled_logprobs: float32, those of the label's token, zero elsewhere.
    sequence_lengths: int64, on the host, padded tokens in the whole row of each of the ``num_sequences`` sequences
    and of the row's padding, where there is any. cu_seqlens: int32, their bounds.
    old_logprobs, reference_logprobs: float32 [T] or None where not needed.
    """

    token_ids: "Tensor"
    labels: "Tensor"
    positions: "Tensor"
    coefficients: "Tensor"
    advantages: "Tensor"
    sampled_logprobs: "Tensor"
    cu_seqlens: "Tensor"
    sequence_lengths: IntArray
    num_sequences: int
    old_logprobs: "Tensor | None" = None
    reference_logprobs: "Tensor | None" = None

    def __post_init__(self) -> None:
        shapes = {tuple(field.shape) for field in (self.token_ids, self.labels, self.positions)}
        shapes |= {tuple(field.shape) for field in (self.coefficients, self.advantages, self.sampled_logprobs)}
        assert len(shapes) == 1, f"fields of different shapes: {shapes}"
        assert len(self.cu_seqlens) == len(self.sequence_lengths) + 1
        assert self.num_sequences in (len(self.sequence_lengths), len(self.sequence_lengths) - 1)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest padded sequence in the whole row."""
        return int(self.sequence_lengths.max())


@dataclass(frozen=True, slots=True)
class LossSums:
    """What the loss of one row adds up to; nothing is divided yet.

    loss: scalar, differentiable. metrics: float32, detached sums over the trained tokens, their count first.
    """

    loss: "Tensor"
    metrics: "Tensor"


class TokenLoss(Protocol):
    """A loss over rows. metric_names: of ``LossSums.metrics`` after the count of tokens, in order."""

    @property
    def metric_names(self) -> tuple[str, ...]: ...

    def __call__(self, logprobs: "Tensor", row: PackedRow) -> LossSums: ...


@dataclass(frozen=True, slots=True)
class TrainStats:
    """What one optimizer step did, the same on every rank.

    loss: the objective that was minimised, after the division by the denominator. grad_norm: before clipping.
    learning_rate: of this step. num_tokens: sampled tokens trained on. metrics: the loss's own, means over those.
    idle: nothing that was kept has a gradient, so no step was taken.
    skipped: loss or gradients were not finite, and nothing was changed.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    metrics: tuple[tuple[str, float], ...]
    idle: bool = False
    skipped: bool = False
