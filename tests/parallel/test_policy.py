"""Two updates through megatron-core against plain float64 torch, on one process and on every axis."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from toy_step import CLIP, ReferenceUpdate, make_model, make_step, reference_update

WORKER = Path(__file__).with_name("layout_worker.py")
TWO_PROCESSES = ("tp2", "tp2_sp", "pp2", "cp2", "dp2", "dp2_sharded", "dp2_sharded_overlap")
CASES = [(layout, tied) for tied in (True, False) for layout in ("one", *TWO_PROCESSES)]


@dataclass(frozen=True)
class Toy:
    """Outcomes of all layouts by (layout, tied), and the references by (tied, number of steps)."""

    outcomes: dict[tuple[str, bool], dict[str, Tensor]]
    references: dict[tuple[bool, int], ReferenceUpdate]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, launch) -> Toy:
    outcomes, references = {}, {}
    for tied in (True, False):
        model = tmp_path_factory.mktemp(f"tied_{tied}") / "model"
        make_model(model, tied=tied)
        launch(WORKER, model, model.parent, "one", num_processes=1)
        launch(WORKER, model, model.parent, *TWO_PROCESSES, num_processes=2)
        for layout in ("one", *TWO_PROCESSES):
            outcomes[layout, tied] = load_file(model.parent / f"{layout}.safetensors")
        for num_steps in (1, 2):
            references[tied, num_steps] = reference_update(
                model, make_step(), num_steps=num_steps, kl_coefficient=0.05
            )
    return Toy(outcomes, references)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Largest absolute difference over the reference's largest absolute value."""
    return float((value.double() - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize(("layout", "tied"), CASES)
def test_logprobs_loss_and_gradient_norm_are_those_of_plain_torch(layout: str, tied: bool, toy: Toy) -> None:
    outcome, first, second = toy.outcomes[layout, tied], toy.references[tied, 1], toy.references[tied, 2]
    total = torch.stack([values.sum() for values in first.logprobs]).sum()
    torch.testing.assert_close(outcome["logprob_sum"], total, rtol=1e-6, atol=0)
    assert int(outcome["tokens"]) == sum(len(values) for values in first.logprobs)
    for number, reference in enumerate((first, second)):
        assert float(outcome[f"loss.{number}"]) == pytest.approx(reference.loss, rel=2e-6)
        assert float(outcome[f"grad_norm.{number}"]) == pytest.approx(reference.grad_norm, rel=2e-6)


@pytest.mark.parametrize(("layout", "tied"), [case for case in CASES if "sharded" not in case[0]])
def test_every_gradient_is_that_of_plain_torch(layout: str, tied: bool, toy: Toy) -> None:
    # float32 against float64 through two layers: 1e-5 of a tensor's largest gradient, ten times what is seen.
    reference = toy.references[tied, 2]
    clip = min(1.0, CLIP / (reference.grad_norm + 1e-6))
    for name, gradient in reference.gradients.items():
        assert relative_error(toy.outcomes[layout, tied][f"gradients.{name}"], gradient * clip) < 1e-5, name


@pytest.mark.parametrize(("layout", "tied"), CASES)
def test_every_parameter_after_two_steps_is_that_of_plain_torch(layout: str, tied: bool, toy: Toy) -> None:
    outcome, reference = toy.outcomes[layout, tied], toy.references[tied, 2]
    for name, weight in reference.weights.items():
        assert relative_error(outcome[f"weights.{name}"], weight) < 1e-6, name
    streamed = {name.removeprefix("weights.") for name in outcome if name.startswith("weights.")}
    assert streamed == set(reference.weights) | {"lm_head.weight"}
    if tied:
        assert torch.equal(outcome["weights.lm_head.weight"], outcome["weights.model.embed_tokens.weight"])
