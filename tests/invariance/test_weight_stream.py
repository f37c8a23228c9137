"""The stream of Hugging Face weights is the policy's own weights, bit for bit, on every layout."""

import pytest
from matrix import PARITY, Case
from suite import Suite

cases = pytest.mark.parametrize("case", PARITY.values(), ids=PARITY)


@cases
def test_a_policy_that_was_just_loaded_streams_the_file_bit_for_bit(case: Case, suite: Suite) -> None:
    # Equal to one file, hence equal on all layouts.
    assert bool(suite.outcomes[case.name]["stream.as_loaded"])


@cases
def test_a_trained_policy_streams_the_shards_that_its_ranks_hold_bit_for_bit(case: Case, suite: Suite) -> None:
    assert bool(suite.outcomes[case.name]["stream.as_held"])
