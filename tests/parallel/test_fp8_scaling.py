"""Numbers and scales of FP8 recipes against their definition in numpy and torch's own float8 types."""

import numpy as np
import pytest
import torch
from fp8_formula import FORMATS, in_blocks, power_of_two, quantized, rounded

from dppo_megatron.parallel.fp8_scaling import (
    E4M3,
    E5M2,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    e8m0_scale,
    full_scale,
    power_of_two_scale,
    round_trip,
)

KINDS = {"e4m3": E4M3, "e5m2": E5M2}
ONE = torch.ones(())


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Magnitudes over thirty binary orders, some zero, one block of zeros."""
    random = np.random.default_rng(0)
    values = random.normal(size=(rows, columns)) * 2.0 ** random.integers(-20, 10, (rows, columns))
    values[random.random((rows, columns)) < 0.1] = 0
    values[:32, :32] = 0
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("kind", FORMATS)
def test_every_bfloat16_is_rounded_as_the_definition_says(kind: str) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = patterns[torch.isfinite(patterns)]
    found = round_trip(values, ONE, KINDS[kind])
    np.testing.assert_array_equal(found.double().numpy(), rounded(values.double().numpy(), kind))


@pytest.mark.parametrize("kind", FORMATS)
def test_torch_s_numbers_are_the_numbers_and_ties_go_to_even(kind: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(KINDS[kind]).float()
    numbers = torch.unique(codes[torch.isfinite(codes)])
    assert torch.equal(round_trip(numbers, ONE, KINDS[kind]), numbers)
    ties = (numbers[1:] + numbers[:-1]) / 2
    np.testing.assert_array_equal(
        round_trip(ties, ONE, KINDS[kind]).double().numpy(), rounded(ties.double().numpy(), kind)
    )
    assert float(numbers.max()) == FORMATS[kind][2]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("contracted", [0, 1])
@pytest.mark.parametrize("is_weight", [False, True])
def test_operands_are_scaled_by_the_recipe(recipe: str, kind: str, contracted: int, is_weight: bool) -> None:
    values = matrix(150, 70)
    made = {
        "tensorwise": CurrentScaling(KINDS[kind]),
        "blockwise": BlockScaling(KINDS[kind], 128, square=is_weight, scale_of=power_of_two_scale),
        "mxfp8": BlockScaling(KINDS[kind], 32, square=False, scale_of=e8m0_scale),
    }[recipe]
    wanted = quantized(values.double().numpy(), recipe=recipe, kind=kind, contracted=contracted, is_weight=is_weight)
    found = made(values, contracted=contracted).double().numpy()
    if recipe == "tensorwise":  # its scale is no power of two: float32 rounds it
        wrong = np.abs(found - wanted) > 1e-6 * np.abs(wanted)
        assert wrong.mean() < 1e-3, "more than a few values at the middle of two numbers"
    else:
        np.testing.assert_array_equal(found, wanted)
    assert not np.array_equal(found, values.numpy()), "nothing was rounded"


def test_blockwise_and_mx_scales_are_the_powers_of_two_on_their_sides() -> None:
    amax = torch.tensor([448.0, 449.0, 447.0, 1.0, 1.75, 1.76, 3e-5])
    assert torch.log2(power_of_two_scale(amax, E4M3)).tolist() == [0, -1, 0, 8, 8, 7, 23]
    assert torch.log2(e8m0_scale(amax, E4M3)).tolist() == [0, -1, 0, 8, 8, 7, 23]
    assert full_scale(torch.tensor(2.0), E4M3).item() == 224.0


@pytest.mark.parametrize("scale_of", [full_scale, power_of_two_scale, e8m0_scale])
def test_a_block_of_zeros_or_of_what_is_not_finite_is_left_at_scale_1(scale_of) -> None:
    assert scale_of(torch.tensor([0.0, float("inf"), float("nan")]), E4M3).tolist() == [1, 1, 1]
    assert torch.isfinite(scale_of(torch.tensor([1e-38, 3e38]), E5M2)).all()
    assert torch.isnan(CurrentScaling(E4M3)(torch.tensor([[float("nan"), 1.0]]), contracted=1))[0, 0]


def test_delayed_scales_come_from_earlier_batches() -> None:
    most_recent = DelayedScaling(E4M3, margin=0, history_length=1, most_recent=True)
    largest = DelayedScaling(E5M2, margin=2, history_length=2, most_recent=False)
    first, second = torch.tensor([[1000.0, 0.3]]), torch.tensor([[10.0, 0.3]])
    assert most_recent(first, contracted=1).tolist() == [[448.0, 0.3125]], "scale 1 first, and no overflow"
    for quantizer in (most_recent, largest):
        quantizer(first, contracted=1)
        quantizer(second, contracted=1)
        assert quantizer.seen is not None
        assert float(quantizer.seen) == 1000.0, "the largest since the last update"
        quantizer.update(quantizer.seen)
        assert quantizer.seen is None
    scale = 448 / 1000
    assert most_recent(second, contracted=1)[0, 1].item() == pytest.approx(
        float(rounded(np.array(0.3) * scale, "e4m3")) / scale
    )
    assert largest(first, contracted=1)[0, 0].item() == pytest.approx(1000.0), "57344 / 4 is a number of E5M2"
    for amax, wanted in ((10.0, 1000.0), (20.0, 20.0), (0.0, 20.0)):
        largest.update(torch.tensor(amax))
        scale = 57344 / wanted / 4
        found = largest(second, contracted=1)[0, 1].item()
        assert found == pytest.approx(float(rounded(np.array(0.3) * scale, "e5m2")) / scale), (amax, wanted)


def test_tail_blocks_are_smaller_blocks() -> None:
    values = matrix(130, 129)
    found = BlockScaling(E4M3, 128, square=True, scale_of=power_of_two_scale)(values, contracted=0)
    wanted = in_blocks(values.double().numpy(), "e4m3", height=128, width=128, scale_of=power_of_two)
    np.testing.assert_array_equal(found.double().numpy(), wanted)
