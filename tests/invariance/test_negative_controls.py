"""Each protection, removed, makes the parity suite red: its tolerances see what they are there to see."""

import pytest
from matrix import CONTROLS, Case
from suite import Suite
from test_parity import FLOAT32


@pytest.mark.parametrize("case", CONTROLS.values(), ids=CONTROLS)
def test_a_removed_protection_is_far_outside_the_tolerances(case: Case, suite: Suite) -> None:
    for deviations in (suite.from_plain_torch(case), suite.from_one_process(case)):
        assert any(deviations[quantity] > 100 * tolerance for quantity, tolerance in FLOAT32.items())
