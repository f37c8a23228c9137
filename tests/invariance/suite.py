"""What the launches of the parity suite left behind, and how it is compared."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from deviations import QUANTITIES, Deviations, Outcome, compare
from matrix import Case
from toy_step import ToyStep, make_step

TABLE = pytest.StashKey[dict[str, tuple[Deviations, Deviations]]]()
"""Of each configuration, the deviations from plain torch and from one process."""
REPLAYS = pytest.StashKey[dict[str, list[str]]]()
"""Of each layout's replay of one process's run, how far loss and parameters were off."""
DIVERGENCES = pytest.StashKey[dict[str, str]]()
"""Of each layout, where a free run first sampled another token."""


@dataclass(frozen=True)
class Suite:
    """Outcomes by name, of every case and of plain torch by (model, setting)."""

    outcomes: dict[str, Outcome]
    plain: Callable[[str, str], Outcome]

    def from_plain_torch(self, case: Case) -> Deviations:
        """Deviations from the same update in float64, which knows no layout."""
        return compare(self.outcomes[case.name], self.plain(case.model, case.setting))

    def from_one_process(self, case: Case) -> Deviations:
        """Deviations from one process of the same model and arithmetic."""
        name = f"{case.model}-one" + ("" if case.setting == "float32" else f"-{case.setting}")
        one = self.outcomes[name]
        return compare(self.outcomes[case.name], {key: one[key] for key in one if key.split(".")[0] in QUANTITIES})


def step_of(setting: str) -> ToyStep:
    """The step that a setting's cases take; in the long one a prompt has twelve times the others' tokens."""
    return make_step(longest_prompt=90 if setting == "long" else None)
