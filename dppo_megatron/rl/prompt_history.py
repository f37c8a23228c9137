"""What is known of each prompt from its last visits: how much advantage signal its group gave."""

import numpy as np
from numpy.typing import NDArray

from dppo_megatron.batches import FloatArray, IntArray, ScoredBatch
from dppo_megatron.config.schema import GresoConfig
from dppo_megatron.rl.fixed_point import from_fixed_point, to_fixed_point
from dppo_megatron.rl.greso import Exploration

# New prompts wait in a small table, so that a step does not copy the large one.
_MIN_OVERFLOW = 4096
_OVERFLOW_FRACTION = 16
_LONGEST_RUN = 2**15 - 1
_VISITS = np.dtype([("score", np.float64), ("zero_run", np.int16)])


class PromptHistory:
    """Prompt id -> exponential moving average, over visits, of the mean |advantage| of the prompt's group.

    A first visit sets the score; each later one moves it by ``1 - ema_decay`` of the difference. Beside it the
    number of visits in a row whose rewards were all equal. The content depends only on what was recorded, step by
    step: not on the order within a step, the layout or restarts; keys are hashes of content, so that it outlives
    reordering and extending the data.
    Cost: 18 bytes a prompt, in two sorted tables (at most one in 16 prompts in the small one).

    greso: with it, ``exploration`` follows GRESO's controller; without, it is None.
    Raises: ValueError for a decay outside [0, 1).
    Source: H_t(q) of Zhu et al., arXiv 2603.04135.
    """

    def __init__(self, *, ema_decay: float, greso: GresoConfig | None = None) -> None:
        if not 0 <= ema_decay < 1:
            raise ValueError(f"dppo.prompt_pruning.ema_decay: {ema_decay}; allowed: at least 0, below 1")
        self._ema_decay = ema_decay
        self._greso = greso
        initial = greso.initial_exploration if greso else 0.0
        self.exploration = Exploration(initial, initial) if greso else None
        self._ids = np.zeros(0, np.int64)
        self._visits = np.zeros(0, _VISITS)
        self._new_ids = np.zeros(0, np.int64)
        self._new_visits = np.zeros(0, _VISITS)

    def __len__(self) -> int:
        return len(self._ids) + len(self._new_ids)

    def lookup(self, prompt_ids: IntArray) -> tuple[FloatArray, NDArray[np.bool_]]:
        """Scores float64 [P] (0 where never seen) and whether each prompt was seen [P]."""
        visits, seen = self._lookup(prompt_ids)
        return visits["score"], seen

    def zero_runs(self, prompt_ids: IntArray) -> IntArray:
        """Latest visits in a row whose rewards were all equal, int64 [P]; negative where those were not positive."""
        return self._lookup(prompt_ids)[0]["zero_run"].astype(np.int64)

    def record(self, scores: ScoredBatch) -> None:
        """Add one visit to each prompt of the batch; a prompt that occurs k times is visited once, by the mean."""
        if not len(scores):
            return
        ids, sizes, zero_signs = _groups(scores)
        old, seen = self._lookup(ids)
        updated = np.zeros(len(ids), _VISITS)
        updated["score"] = np.where(seen, self._ema_decay * old["score"] + (1 - self._ema_decay) * sizes, sizes)
        lengths = np.minimum(np.abs(old["zero_run"].astype(np.int64)) + 1, _LONGEST_RUN)
        updated["zero_run"] = zero_signs * lengths
        for known, table in ((self._ids, self._visits), (self._new_ids, self._new_visits)):
            places, found = _find(ids, known)
            table[places[found]] = updated[found]
        self._new_ids, self._new_visits = _insert(
            self._new_ids, self._new_visits, ids=ids[~seen], visits=updated[~seen]
        )
        if len(self._new_ids) > max(_MIN_OVERFLOW, len(self._ids) // _OVERFLOW_FRACTION):
            self._ids, self._visits = self._merged()
            self._new_ids, self._new_visits = self._new_ids[:0], self._new_visits[:0]
        if self._greso is not None and self.exploration is not None:
            self.exploration = self.exploration.moved(
                num_easy=int((zero_signs > 0).sum()),
                num_hard=int((zero_signs < 0).sum()),
                num_groups=len(ids),
                config=self._greso,
            )

    def state(self) -> dict[str, NDArray[np.generic]]:
        """All for a checkpoint: prompt_ids int64 [n] rising, scores float64 [n], zero_runs int16 [n], exploration."""
        ids, visits = self._merged()
        exploration = [self.exploration.easy, self.exploration.hard] if self.exploration else []
        return {
            "prompt_ids": ids,
            "scores": visits["score"],
            "zero_runs": visits["zero_run"],
            "exploration": np.array(exploration, np.float64),
        }

    @classmethod
    def from_state(
        cls, state: dict[str, NDArray[np.generic]], *, ema_decay: float, greso: GresoConfig | None = None
    ) -> "PromptHistory":
        """The history that ``state()`` describes. Raises: ValueError where it cannot be one."""
        history = cls(ema_decay=ema_decay, greso=greso)
        ids, scores = np.array(state["prompt_ids"], np.int64), np.array(state["scores"], np.float64)
        runs = np.array(state["zero_runs"], np.int16)
        if (
            not ids.shape == scores.shape == runs.shape
            or (ids[1:] <= ids[:-1]).any()
            or not np.isfinite(scores).all()
        ):
            raise ValueError(
                f"prompt history: prompt_ids {ids.shape}, scores {scores.shape}, zero_runs {runs.shape}; "
                "allowed: rising ids, one finite score and one run each"
            )
        history._ids, history._visits = ids, np.zeros(len(ids), _VISITS)
        history._visits["score"], history._visits["zero_run"] = scores, runs
        exploration = np.array(state["exploration"], np.float64)
        if greso is not None and len(exploration):
            history.exploration = Exploration(*exploration.tolist())
        return history

    def _lookup(self, prompt_ids: IntArray) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        visits = np.zeros(len(prompt_ids), _VISITS)
        seen = np.zeros(len(prompt_ids), np.bool_)
        for ids, table in ((self._ids, self._visits), (self._new_ids, self._new_visits)):
            places, found = _find(prompt_ids, ids)
            visits[found] = table[places[found]]
            seen |= found
        return visits, seen

    def _merged(self) -> tuple[IntArray, NDArray[np.void]]:
        return _insert(self._ids, self._visits, ids=self._new_ids, visits=self._new_visits)


def _find(prompt_ids: IntArray, ids: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
    """Places of prompts in sorted ids, and whether each stands there."""
    places = np.searchsorted(ids, prompt_ids)
    found = np.zeros(len(prompt_ids), np.bool_)
    inside = places < len(ids)
    found[inside] = ids[places[inside]] == prompt_ids[inside]
    return places, found


def _insert(
    old_ids: IntArray, old_visits: NDArray[np.void], *, ids: IntArray, visits: NDArray[np.void]
) -> tuple[IntArray, NDArray[np.void]]:
    """Sorted tables with sorted new ids and their visits added."""
    places = np.searchsorted(old_ids, ids)
    return np.insert(old_ids, places, ids), np.insert(old_visits, places, visits)


def _groups(scores: ScoredBatch) -> tuple[IntArray, FloatArray, IntArray]:
    """Distinct prompt ids, rising; over all occurrences of each the mean |advantage|; and a sign.

    The sign is 0 where any advantage is not zero, else 1 where the mean reward is positive and -1 where not.
    """
    values, shift = to_fixed_point(np.abs(scores.advantages))
    ids, inverse, counts = np.unique(scores.prompts.prompt_ids, return_inverse=True, return_counts=True)
    sums, rewards = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
    np.add.at(sums, inverse, values.reshape(-1, scores.num_generations).sum(axis=1))
    reward_values, _ = to_fixed_point(scores.rewards)
    np.add.at(rewards, inverse, reward_values.reshape(-1, scores.num_generations).sum(axis=1))
    signs = np.where(sums > 0, 0, np.where(rewards > 0, 1, -1))
    return ids, from_fixed_point(sums / (counts * scores.num_generations), shift=shift), signs
