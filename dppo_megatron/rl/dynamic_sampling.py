"""Dynamic sampling: whether a step's first rollouts do, or more are drawn until enough groups have a gradient."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dppo_megatron.batches import IntArray, RolloutBatch, ScoredBatch
from dppo_megatron.rl.merging import merge, take_prompts
from dppo_megatron.rl.prompts import equal_chunks

SampleMore = Callable[[IntArray], tuple[RolloutBatch, ScoredBatch]]
"""Rollouts of further candidates: given the ids of this step's earlier candidates, this rank's rollouts and
everybody's scores."""


class Resampling(Protocol):
    """What decides whether a step's rollouts are enough."""

    def complete(
        self, rollouts: RolloutBatch, scores: ScoredBatch, *, sample_more: SampleMore, rank: int, num_ranks: int
    ) -> tuple[RolloutBatch, ScoredBatch]:
        """What the step trains on; called by every generating rank with the same scores."""
        ...


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """The first rollouts are enough."""

    def complete(
        self, rollouts: RolloutBatch, scores: ScoredBatch, *, sample_more: SampleMore, rank: int, num_ranks: int
    ) -> tuple[RolloutBatch, ScoredBatch]:
        """The rollouts as they are."""
        return rollouts, scores


@dataclass(frozen=True, slots=True)
class WholeGroups:
    """Groups whose advantages are not all zero, until there are enough; groups are kept or dropped whole.

    It stops on what was realised, which changes the objective: the mean is over groups that have a gradient.
    num_prompts: groups a step trains on, in ``num_minibatches`` optimizer steps. max_batches: bound of the rollouts.

    Source: Yu et al., "DAPO" (arXiv 2503.14476), section 3.2.
    """

    num_prompts: int
    num_minibatches: int
    max_batches: int

    def complete(
        self, rollouts: RolloutBatch, scores: ScoredBatch, *, sample_more: SampleMore, rank: int, num_ranks: int
    ) -> tuple[RolloutBatch, ScoredBatch]:
        """The first ``num_prompts`` such groups in the order of the candidates.

        Raises: RuntimeError where ``max_batches`` batches of rollouts do not hold as many.
        """
        parts, found, earlier = [], 0, np.zeros(0, np.int64)
        for number in range(self.max_batches):
            if number:
                rollouts, scores = sample_more(earlier)
            earlier = np.concatenate([earlier, scores.prompts.prompt_ids])
            rows = np.flatnonzero((scores.advantages.reshape(-1, scores.num_generations) != 0).any(axis=1))
            rows = rows[: self.num_prompts - found]
            found += len(rows)
            parts.append(take_prompts(rollouts, scores, rows, rank=rank, num_ranks=num_ranks))
            if found == self.num_prompts:
                return self._assigned(parts, rank=rank, num_ranks=num_ranks)
        raise RuntimeError(
            f"dynamic sampling found {found} of {self.num_prompts} groups with different rewards in "
            f"{self.max_batches} batches of rollouts; raise grpo.dynamic_sampling_max_gen_batches or "
            "grpo.batch_multiplier, or take prompts that are neither too easy nor too hard"
        )

    def _assigned(
        self, parts: list[tuple[RolloutBatch, ScoredBatch]], *, rank: int, num_ranks: int
    ) -> tuple[RolloutBatch, ScoredBatch]:
        """The parts as one batch, its groups assigned to mini-batches anew: before any completion is pruned."""
        minibatches = equal_chunks(self.num_prompts, num_chunks=self.num_minibatches)
        rollouts, scores = merge(parts, num_candidates=np.bincount(minibatches).astype(np.int64), num_ranks=num_ranks)
        assert scores.owners is not None
        mine = minibatches[scores.owners == rank]
        return (
            replace(rollouts, prompts=replace(rollouts.prompts, minibatches=mine)),
            replace(scores, prompts=replace(scores.prompts, minibatches=minibatches)),
        )
