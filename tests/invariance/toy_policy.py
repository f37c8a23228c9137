"""A policy small enough to try every outcome of pruning: linear in fixed features, in float64, with the real loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dppo_megatron.batches import (
    FinishReason,
    FloatArray,
    IntArray,
    PackedRow,
    PromptBatch,
    Purpose,
    Ragged,
    ScoredBatch,
)
from dppo_megatron.config.schema import LossConfig
from dppo_megatron.parallel.mesh import Axis
from dppo_megatron.parallel.sequence_sums import SequenceSums
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.loss import PolicyLoss

ADVANTAGES = {10: (0.8, -0.8, 0.0), 20: (1.2, -0.5, -0.7)}
LENGTHS = {10: (3, 1, 2), 20: (2, 3, 1)}
SURPRISES = {10: (0.9, 0.2, 0.5), 20: (0.1, 1.4, 0.0)}
GROUP, VOCABULARY, FEATURES, MAX_NEW_TOKENS = 3, 5, 4, 3
ONE_RANK = Axis("cp", 1, 0, cast(Any, None), (0,))


def candidates(prompt_ids: ArrayLike, *, num_minibatches: int = 1) -> PromptBatch:
    """Prompts with weight 1, in contiguous mini-batches."""
    ids = np.asarray(prompt_ids, np.int64)
    count = len(ids)
    minibatches = np.arange(count) * num_minibatches // count
    return PromptBatch(
        prompt_ids=ids,
        occurrences=np.zeros(count, np.int64),
        minibatches=minibatches,
        tokens=Ragged.from_rows([[1]] * count),
        texts=("",) * count,
        answers=("",) * count,
        weights=np.ones(count),
        num_candidates=np.bincount(minibatches, minlength=num_minibatches),
    )


def scored(prompts: PromptBatch, *, finish_reasons: IntArray | None = None) -> ScoredBatch:
    """What ADVANTAGES, LENGTHS and SURPRISES say of the prompts."""
    ids = prompts.prompt_ids.tolist()
    advantages = np.array([ADVANTAGES[q] for q in ids], np.float64).reshape(-1)
    return ScoredBatch(
        prompts=prompts,
        num_generations=GROUP,
        rewards=advantages,
        advantages=advantages,
        completion_lengths=np.array([LENGTHS[q] for q in ids], np.int64).reshape(-1),
        finish_reasons=np.full(len(advantages), FinishReason.STOP, np.int64),
        surprises=np.array([SURPRISES[q] for q in ids], np.float64).reshape(-1),
    )


@dataclass(frozen=True)
class _Tokens:
    """One completion: features [T, F], labels [T], and log-probs under the other policies [T]."""

    features: Tensor
    labels: Tensor
    old: Tensor
    sampled: Tensor
    reference: Tensor


class ToyPolicy:
    """log softmax(features @ W): ratios between 0.4 and 2.5, so that clips are at work."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(5)
        self.weight = torch.randn(FEATURES, VOCABULARY, generator=draw, dtype=torch.float64).requires_grad_()
        self._tokens = {}
        for prompt, lengths in LENGTHS.items():
            for index, length in enumerate(lengths):
                features = torch.randn(length, FEATURES, generator=draw, dtype=torch.float64)
                labels = torch.randint(VOCABULARY, (length,), generator=draw)
                with torch.no_grad():
                    now = self._logprobs(features, labels)
                shifts = torch.randn(3, length, generator=draw, dtype=torch.float64) * 0.4
                self._tokens[prompt, index] = _Tokens(
                    features, labels, now + shifts[0], now + shifts[0] + shifts[1] / 2, now + shifts[2]
                )

    def _logprobs(self, features: Tensor, labels: Tensor) -> Tensor:
        return torch.log_softmax(features @ self.weight, -1).gather(1, labels[:, None]).squeeze(1)

    def gradient(
        self,
        sequences: Sequence[tuple[int, int]],
        *,
        advantages: FloatArray,
        weights: FloatArray,
        denominator: float,
        loss_fn: LossConfig,
        token_level: bool,
    ) -> FloatArray:
        """Gradient of the weighted loss of (prompt id, completion index) sequences in one row, [F * V]."""
        if not sequences:
            return np.zeros(FEATURES * VOCABULARY)
        parts = [self._tokens[name] for name in sequences]
        lengths = torch.tensor([len(part.labels) for part in parts])
        coefficients = torch.as_tensor(weights, dtype=torch.float64)
        if not token_level:
            coefficients = coefficients / lengths
        labels = torch.cat([part.labels for part in parts])
        row = PackedRow(
            token_ids=labels,
            labels=labels,
            positions=torch.zeros_like(labels),
            coefficients=coefficients.repeat_interleave(lengths),
            advantages=torch.as_tensor(advantages, dtype=torch.float64).repeat_interleave(lengths),
            sampled_logprobs=torch.cat([part.sampled for part in parts]),
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
            sequence_lengths=lengths.numpy(),
            num_sequences=len(lengths),
            old_logprobs=torch.cat([part.old for part in parts]),
            reference_logprobs=torch.cat([part.reference for part in parts]),
        )
        logprobs = self._logprobs(torch.cat([part.features for part in parts]), labels)
        loss = PolicyLoss(loss_fn, sequence_sums=SequenceSums(ONE_RANK))(logprobs, row).loss / denominator
        return torch.autograd.grad(loss, self.weight)[0].numpy().ravel()


@dataclass(frozen=True)
class ChosenDraws(Draws):
    """Draws with given outcomes: of the independent draws which items stay, of the systematic ones the starts.

    keep: (prompt id,) or (prompt id, completion index) of items that an independent draw keeps. starts: by level.
    """

    keep: frozenset[tuple[int, ...]] = frozenset()
    starts: tuple[float, float] | None = None

    def words(self, purpose: Purpose, *parts: ArrayLike) -> NDArray[np.uint64]:
        if self.starts is not None:
            return Draws.words(self, purpose, *parts)
        _, ids, _, *completion = np.broadcast_arrays(*parts)
        items = zip(ids.tolist(), *(part.tolist() for part in completion), strict=True)
        return np.where([item in self.keep for item in items], np.uint64(0), np.uint64(2**64 - 1))

    def uniform(self, purpose: Purpose, *parts: ArrayLike) -> NDArray[np.float64]:
        assert self.starts is not None
        return np.asarray(self.starts[0 if purpose is Purpose.PROMPT_PRUNING else 1])
