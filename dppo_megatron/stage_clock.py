"""Where a step's wall time goes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import Literal

Stage = Literal[
    "weight_sync",
    "rollout",
    "reward",
    "pruning",
    "packing",
    "logprobs",
    "update",
    "validation",
    "checkpoint",
    "other",
]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Wall seconds by stage of the loop, in the loop's order; ``other`` is time in no stage."""

    weight_sync: float = 0.0
    rollout: float = 0.0
    reward: float = 0.0
    pruning: float = 0.0
    packing: float = 0.0
    logprobs: float = 0.0
    update: float = 0.0
    validation: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0

    def __add__(self, more: "StageSeconds") -> "StageSeconds":
        return StageSeconds(*(a + b for a, b in zip(astuple(self), astuple(more), strict=True)))

    def items(self) -> tuple[tuple[str, float], ...]:
        """(stage, seconds) in the loop's order."""
        return tuple(zip(STAGES, astuple(self), strict=True))

    @property
    def total(self) -> float:
        """Wall seconds of all stages."""
        return sum(astuple(self))

    @property
    def training(self) -> float:
        """Wall seconds without validation and checkpoints, which are not the algorithm's."""
        return self.total - self.validation - self.checkpoint

    def shares(self) -> "StageSeconds":
        """Each stage's fraction of the total; zeros where nothing was timed."""
        total = self.total
        return StageSeconds(*(value / total if total else 0.0 for value in astuple(self)))


STAGES: tuple[str, ...] = tuple(field.name for field in fields(StageSeconds))


class StageClock:
    """Adds up wall seconds by stage, for the step under way and for the run.

    Time before the first stage counts too: build the clock where the first step starts. It reads the host's
    clock; a stage whose device work is still queued hands that time to the stage that waits for it.
    """

    def __init__(
        self, *, now: Callable[[], float] = time.perf_counter, on_stage: Callable[[str], None] = lambda _: None
    ) -> None:
        """``on_stage`` is told of every stage that begins, ``other`` between them."""
        self._now, self._on_stage = now, on_stage
        self._step_start = now()
        self._stage: Stage | None = None
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._run = StageSeconds()

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Count the block's seconds to a stage; stages follow each other and do not nest."""
        assert name in self._seconds, f"stage {name!r} is not one of {STAGES}"
        assert self._stage is None, f"stage {name!r} inside stage {self._stage!r}"
        self._stage = name
        self._on_stage(name)
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - start
            self._stage = None
            self._on_stage("other")

    def step_seconds(self) -> StageSeconds:
        """End the step: its seconds by stage; the next step starts here."""
        assert self._stage is None, f"the step ends inside stage {self._stage!r}"
        end = self._now()
        self._seconds["other"] += end - self._step_start - sum(self._seconds.values())
        step = StageSeconds(**self._seconds)
        self._step_start = end
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._run += step
        return step

    @property
    def run_seconds(self) -> StageSeconds:
        """Seconds of the steps that ended so far."""
        return self._run
