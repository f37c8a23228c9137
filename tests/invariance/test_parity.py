"""Two updates through megatron-core in every configuration, against plain float64 torch and one process.

Tolerances. float32 holds 24 bits, 6e-8; a gradient is a sum over some hundred tokens through two layers, whose
roundings add up to some 1e-6 of the tensor's largest entry whatever the order, so 1e-5 is a few times what is
seen and five orders below what the smallest removed protection moves (test_negative_controls.py). Losses and
norms average roundings out: 1e-6. bfloat16 holds 8 bits, 4e-3, of every activation.
"""

import pytest
import torch
from deviations import QUANTITIES
from matrix import MODELS, PARITY, Case
from suite import Suite, step_of

FLOAT32 = {
    "logprobs": 1e-5,
    "loss": 1e-6,
    "grad_norm": 1e-6,
    "gradients": 1e-5,
    "first": 1e-5,
    "second": 1e-5,
    "weights": 1e-6,
}
BFLOAT16 = {
    "logprobs": 1e-1,
    "loss": 2e-3,
    "grad_norm": 1e-2,
    "gradients": 1e-1,
    "first": 1e-1,
    "second": 2e-1,
    "weights": 2e-2,
}

cases = pytest.mark.parametrize("case", PARITY.values(), ids=PARITY)


def allowed(case: Case) -> dict[str, float]:
    """Tolerances of a case's arithmetic."""
    return BFLOAT16 if case.setting == "bfloat16" else FLOAT32


@cases
def test_logprobs_loss_gradients_moments_and_parameters_are_those_of_plain_torch(case: Case, suite: Suite) -> None:
    deviations = suite.from_plain_torch(case)
    for quantity, tolerance in allowed(case).items():
        assert deviations[quantity] < tolerance, quantity


@cases
def test_they_are_those_of_one_process_too(case: Case, suite: Suite) -> None:
    deviations = suite.from_one_process(case)
    for quantity, tolerance in allowed(case).items():
        assert deviations[quantity] < tolerance, quantity


@cases
def test_ranks_that_have_decided_differently_all_stop(case: Case, suite: Suite) -> None:
    assert bool(suite.outcomes[case.name]["disagreement_ends_the_run"])


@cases
def test_every_sampled_token_is_trained_on_once(case: Case, suite: Suite) -> None:
    assert int(suite.outcomes[case.name]["tokens"]) == step_of(case.setting).plan.completion_lengths.sum()


@pytest.mark.parametrize("case", [case for case in PARITY.values() if case.virtual_pp > 1], ids=lambda c: c.name)
def test_interleaved_stages_take_turns_with_the_layers(case: Case, suite: Suite) -> None:
    # Otherwise the rows of the matrix would show nothing of the interleaved schedule.
    assert suite.outcomes[case.name]["layers_of_first_rank"].tolist() == [0, 2]


@pytest.mark.parametrize("case", [case for case in PARITY.values() if "recompute" in case.name], ids=lambda c: c.name)
def test_recomputed_activations_change_no_bit(case: Case, suite: Suite) -> None:
    outcome, stored = suite.outcomes[case.name], suite.outcomes[f"{case.model}-{case.layout}"]
    names = [name for name in stored if name.split(".")[0] in QUANTITIES]
    assert all(torch.equal(outcome[name], stored[name]) for name in names)


@pytest.mark.parametrize(
    "case", [case for case in PARITY.values() if case.setting == "bfloat16"], ids=lambda c: c.name
)
def test_bfloat16_parameters_are_float32_main_parameters_rounded(case: Case, suite: Suite) -> None:
    outcome = suite.outcomes[case.name]
    names = [name.removeprefix("weights.") for name in outcome if name.startswith("weights.")]
    for name in names:
        main, weight = outcome[f"main.{name}"], outcome[f"weights.{name}"]
        assert (main.dtype, weight.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(main.bfloat16(), weight), name
        assert outcome[f"gradients.{name}"].dtype == torch.float32
    assert any(not torch.equal(outcome[f"main.{name}"], outcome[f"weights.{name}"].float()) for name in names)


@cases
def test_the_padding_rows_of_the_vocabulary_reach_no_sampler(case: Case, suite: Suite) -> None:
    outcome = suite.outcomes[case.name]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert len(outcome[f"weights.{name}"]) == 61
    if MODELS[case.model]["tied"]:
        assert torch.equal(outcome["weights.lm_head.weight"], outcome["weights.model.embed_tokens.weight"])
