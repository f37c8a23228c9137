"""How much advantage signal each prompt gave when it was last visited."""

import numpy as np
from numpy.typing import NDArray

from dppo_megatron.batches import FloatArray, IntArray, ScoredBatch
from dppo_megatron.rl.fixed_point import from_fixed_point, to_fixed_point

# New prompts wait in a small table, so that a step does not copy the large one.
_MIN_OVERFLOW = 4096
_OVERFLOW_FRACTION = 16


class PromptHistory:
    """Prompt id -> exponential moving average, over visits, of the mean |advantage| of the prompt's group.

    A first visit sets the score; each later one moves it by ``1 - ema_decay`` of the difference. The content
    depends only on what was recorded, step by step: not on the order within a step, the layout or restarts.
    Cost: 16 bytes a prompt, in two sorted tables (at most one in 16 prompts in the small one).

    Raises: ValueError for a decay outside [0, 1).
    Source: H_t(q) of Zhu et al., arXiv 2603.04135.
    """

    def __init__(self, *, ema_decay: float) -> None:
        if not 0 <= ema_decay < 1:
            raise ValueError(f"dppo.prompt_pruning.ema_decay: {ema_decay}; allowed: at least 0, below 1")
        self._ema_decay = ema_decay
        self._ids = np.zeros(0, np.int64)
        self._scores = np.zeros(0, np.float64)
        self._new_ids = np.zeros(0, np.int64)
        self._new_scores = np.zeros(0, np.float64)

    def __len__(self) -> int:
        return len(self._ids) + len(self._new_ids)

    def lookup(self, prompt_ids: IntArray) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Scores float64 [P] (0 where never seen) and whether each prompt was seen [P]."""
        scores = np.zeros(len(prompt_ids))
        seen = np.zeros(len(prompt_ids), np.bool_)
        for ids, table in ((self._ids, self._scores), (self._new_ids, self._new_scores)):
            places, found = _find(prompt_ids, ids)
            scores[found] = table[places[found]]
            seen |= found
        return scores, seen

    def record(self, scores: ScoredBatch) -> None:
        """Add one visit to each prompt of the batch; a prompt that occurs k times is visited once, by the mean."""
        if not len(scores):
            return
        ids, visits = _visits(scores)
        old, seen = self.lookup(ids)
        updated = np.where(seen, self._ema_decay * old + (1 - self._ema_decay) * visits, visits)
        for known, table in ((self._ids, self._scores), (self._new_ids, self._new_scores)):
            places, found = _find(ids, known)
            table[places[found]] = updated[found]
        self._new_ids, self._new_scores = _insert(
            self._new_ids, self._new_scores, ids=ids[~seen], scores=updated[~seen]
        )
        if len(self._new_ids) > max(_MIN_OVERFLOW, len(self._ids) // _OVERFLOW_FRACTION):
            self._ids, self._scores = self._merged()
            self._new_ids, self._new_scores = self._new_ids[:0], self._new_scores[:0]

    def state(self) -> dict[str, NDArray[np.generic]]:
        """All scores for a checkpoint: prompt_ids int64 [n] rising, scores float64 [n]."""
        ids, scores = self._merged()
        return {"prompt_ids": ids, "scores": scores}

    @classmethod
    def from_state(cls, state: dict[str, NDArray[np.generic]], *, ema_decay: float) -> "PromptHistory":
        """The history that ``state()`` describes. Raises: ValueError where it cannot be one."""
        history = cls(ema_decay=ema_decay)
        ids, scores = np.array(state["prompt_ids"], np.int64), np.array(state["scores"], np.float64)
        if ids.shape != scores.shape or (ids[1:] <= ids[:-1]).any() or not np.isfinite(scores).all():
            raise ValueError(
                f"prompt history: prompt_ids {ids.shape}, scores {scores.shape}; "
                "allowed: rising ids, one finite score each"
            )
        history._ids, history._scores = ids, scores
        return history

    def _merged(self) -> tuple[IntArray, FloatArray]:
        return _insert(self._ids, self._scores, ids=self._new_ids, scores=self._new_scores)


def _find(prompt_ids: IntArray, ids: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
    """Places of prompts in sorted ids, and whether each stands there."""
    places = np.searchsorted(ids, prompt_ids)
    found = np.zeros(len(prompt_ids), np.bool_)
    inside = places < len(ids)
    found[inside] = ids[places[inside]] == prompt_ids[inside]
    return places, found


def _insert(
    old_ids: IntArray, old_scores: FloatArray, *, ids: IntArray, scores: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Sorted tables with sorted new ids and their scores added."""
    places = np.searchsorted(old_ids, ids)
    return np.insert(old_ids, places, ids), np.insert(old_scores, places, scores)


def _visits(scores: ScoredBatch) -> tuple[IntArray, FloatArray]:
    """Distinct prompt ids, rising, and the mean |advantage| over all occurrences of each."""
    values, shift = to_fixed_point(np.abs(scores.advantages))
    ids, inverse, counts = np.unique(scores.prompts.prompt_ids, return_inverse=True, return_counts=True)
    sums = np.zeros(len(ids), np.int64)
    np.add.at(sums, inverse, values.reshape(-1, scores.num_generations).sum(axis=1))
    return ids, from_fixed_point(sums / (counts * scores.num_generations), shift=shift)
