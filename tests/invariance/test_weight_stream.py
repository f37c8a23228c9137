"""The stream of Hugging Face weights is the policy's own weights, bit for bit, on every layout."""

import pytest
from matrix import BUCKET_BYTES, PARITY, STREAM_MEASURED, Case
from suite import Suite

cases = pytest.mark.parametrize("case", PARITY.values(), ids=PARITY)


@cases
def test_a_policy_that_was_just_loaded_streams_the_file_bit_for_bit(case: Case, suite: Suite) -> None:
    # Equal to one file, hence equal on all layouts.
    assert bool(suite.outcomes[case.name]["stream.as_loaded"])


@cases
def test_a_trained_policy_streams_the_shards_that_its_ranks_hold_bit_for_bit(case: Case, suite: Suite) -> None:
    assert bool(suite.outcomes[case.name]["stream.as_held"])


@cases
def test_engines_of_several_ranks_get_their_parts_of_the_same_tensors(case: Case, suite: Suite) -> None:
    assert bool(suite.outcomes[case.name]["stream.parts"])


@pytest.mark.parametrize(("name", "tp"), STREAM_MEASURED.items(), ids=STREAM_MEASURED)
def test_streaming_holds_no_more_than_a_bucket_of_each_rank_and_one_parameter(
    name: str, tp: int, suite: Suite
) -> None:
    outcome = suite.outcomes[name]
    largest = max(tensor.numel() * 4 for key, tensor in outcome.items() if key.startswith("main."))
    fused = 2 * largest  # queries, keys and values, or gate and up, are one parameter
    bucket = max(BUCKET_BYTES, fused // tp)
    # Flattened on its own rank, gathered from all, and the parameter that is being handed over.
    bound = (1 + tp) * bucket + 2 * fused
    assert 0 < int(outcome["stream.peak"]) <= bound
    assert int(outcome["stream.peak_of_one_bucket"]) > 1.5 * int(outcome["stream.peak"])
