"""Rehearsed FP8: its products against the definition in numpy, in a linear, in a whole model, and on layouts."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fp8_formula import quantized, rounded
from safetensors.torch import load_file
from torch import Tensor
from toy_step import TEMPERATURE, make_model
from transformers import Qwen3ForCausalLM

from dppo_megatron.config.fp8 import Fp8Config
from dppo_megatron.parallel.fp8_rehearsal import Fp8Rehearsal, rehearse
from dppo_megatron.parallel.mesh import Axis

WORKER = Path(__file__).parent / "fp8_worker.py"
ALONE = Axis("stage", 1, 0, cast(Any, None), (0,))
FORWARD = ("tensorwise", "blockwise", "mxfp8")
Found = dict[str, dict[str, Tensor]]


class Linear:
    """As much of megatron-core's linear as is replaced in it."""

    def _forward_impl(self, **_: object) -> Tensor:
        raise AssertionError("not rehearsed")

    def __call__(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._forward_impl(
            input=inputs,
            weight=weight,
            bias=bias,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=None,
            gradient_accumulation_fusion=False,
        )


def layer(number: int) -> Any:
    """A transformer layer, as far as its linears go."""
    return SimpleNamespace(
        layer_number=number,
        self_attention=SimpleNamespace(linear_qkv=Linear(), linear_proj=Linear()),
        mlp=SimpleNamespace(linear_fc1=Linear(), linear_fc2=Linear()),
    )


def rehearsed(num_layers: int = 1, **section: Any) -> list[Any]:
    """Layers of a stage whose linears are rehearsed."""
    layers = [layer(number + 1) for number in range(num_layers)]
    config: Any = SimpleNamespace(
        num_layers=num_layers, fp8_margin=0, fp8_amax_history_len=1, fp8_amax_compute_algo="most_recent"
    )
    chunk = SimpleNamespace(decoder=SimpleNamespace(layers=layers))
    rehearse(chunk, Fp8Rehearsal(Fp8Config(enabled=True, **section), config, amax_axis=ALONE))
    return layers


def spread(*shape: int) -> Tensor:
    """Random values over twenty-five binary orders."""
    return (torch.randn(shape) * 2.0 ** torch.randint(-20, 5, shape)).requires_grad_()


@pytest.mark.parametrize("recipe", FORWARD)
@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
def test_a_linear_s_three_products_are_of_quantized_operands(recipe: str, fp8: str) -> None:
    torch.manual_seed(0)
    # Magnitudes far apart: where all are alike, a power of two more or less in a scale rounds nothing otherwise.
    inputs, weight, gradient = (spread(*shape) for shape in ((3, 50, 160), (144, 160), (3, 50, 144)))
    bias = torch.randn(144, requires_grad=True)
    output = rehearsed(fp8=fp8, fp8_recipe=recipe)[0].mlp.linear_fc1(inputs, weight, bias)
    output.backward(gradient.detach())
    x, w, g = (tensor.detach().double().numpy() for tensor in (inputs.flatten(0, 1), weight, gradient.flatten(0, 1)))

    def q(values: np.ndarray, contracted: int, kind: str = "e4m3", *, is_weight: bool = False) -> np.ndarray:
        return quantized(values, recipe=recipe, kind=kind, contracted=contracted, is_weight=is_weight)

    backward = "e5m2" if fp8 == "hybrid" else "e4m3"
    wanted = (
        (output.detach().flatten(0, 1), q(x, 1) @ q(w, 1, is_weight=True).T + bias.detach().numpy()),
        (inputs.grad, (q(g, 1, backward) @ q(w, 0, is_weight=True)).reshape(3, 50, 160)),
        (weight.grad, q(g, 0, backward).T @ q(x, 0)),
        (bias.grad, g.sum(0)),
    )
    for found, right in wanted:
        assert found is not None
        error = np.abs(found.double().numpy() - right).max() / np.abs(right).mean()
        assert error < (1e-2 if recipe == "tensorwise" else 1e-5), error
    exact = (x @ w.T, (g @ w).reshape(3, 50, 160), g.T @ x)
    for (found, _), unquantized in zip(wanted, exact, strict=False):
        assert found is not None
        difference = np.abs(found.double().numpy() - unquantized).mean() / np.abs(unquantized).mean()
        assert difference > 0.01, "as if nothing had been quantised"


def test_only_the_layers_between_the_first_and_the_last_are_rehearsed() -> None:
    layers = rehearsed(5, first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    inputs, weight = torch.randn(4, 32), torch.randn(8, 32)
    in_fp8 = []
    for number, one in enumerate(layers):
        try:
            one.self_attention.linear_proj(inputs, weight)
            in_fp8.append(number)
        except AssertionError:
            pass
    assert in_fp8 == [1, 2]


def test_delayed_scales_move_after_a_training_pass_alone() -> None:
    one = rehearsed(fp8="hybrid", fp8_recipe="delayed")[0]
    linears = (one.self_attention.linear_qkv, one.self_attention.linear_proj, one.mlp.linear_fc1, one.mlp.linear_fc2)
    weight = torch.full((1, 1), 1.0, requires_grad=True)
    large = torch.tensor([[1000.0]])

    def through(value: Tensor) -> float:
        for linear in linears:
            value = linear(value, weight)
        if value.requires_grad:
            value.backward(torch.tensor([[1e5]]))
        return value.item()

    with torch.no_grad():
        assert through(large) == 448.0, "scale 1, cut at the largest number"
        assert through(large) == 448.0, "a pass without gradients moves no scale"
    assert through(large) == 448.0
    assert weight.grad is not None
    assert weight.grad.item() == 57344 * 448 * 4, "the gradient is cut too: its scale was 1"
    weight.grad = None
    # Forward the first linear saw 1000 and the others what it let through; backward the last one saw 1e5.
    assert through(torch.tensor([[900.0]])) == 448.0
    assert weight.grad is not None
    first_input = float(rounded(np.array(900 * 0.448), "e4m3")) / 0.448
    assert weight.grad.item() == pytest.approx(1e5 * 448 + 57344 * (448 + 448 + first_input), rel=1e-5)


def quantize_linears(model: Qwen3ForCausalLM, *, recipe: str, layers: tuple[int, ...]) -> None:
    """Replace products of some layers by products of operands that numpy quantises."""
    for number in layers:
        one: Any = model.model.layers[number]
        attention, mlp = one.self_attn, one.mlp
        families = [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        # megatron-core holds these in one weight, so that they share a scale where all of it does.
        for family in [*families, [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]:
            fused = np.concatenate([linear.weight.detach().double().numpy() for linear in family])
            whole = quantized(fused, recipe=recipe, kind="e4m3", contracted=1, is_weight=True)
            parts = np.split(whole, np.cumsum([len(linear.weight) for linear in family])[:-1])
            for linear, weight in zip(family, parts, strict=True):
                linear.forward = lambda inputs, weight=weight: product(inputs, weight, recipe)


def product(inputs: Tensor, weight: np.ndarray, recipe: str) -> Tensor:
    """inputs [1, T, in] quantised, times a weight that is."""
    x = quantized(inputs[0].double().numpy(), recipe=recipe, kind="e4m3", contracted=1, is_weight=False)
    return torch.from_numpy(x @ weight.T).float()[None]


def whole_row(model: Qwen3ForCausalLM, row: dict[str, Tensor]) -> Tensor:
    """Log-probs of a row's labels; its sequences see only themselves."""
    lengths = row["lengths.0"].tolist()
    ids, positions = row["ids.0"][None], torch.cat([torch.arange(length) for length in lengths])[None]
    same = torch.block_diag(*[torch.ones(length, length) for length in lengths]).bool()
    mask = torch.where(same.tril(), 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = model(ids, position_ids=positions, attention_mask=mask).logits[0] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, row["labels.0"][:, None])[:, 0]


CASES = {recipe: [{}, {"fp8_recipe": recipe}, 0] for recipe in FORWARD} | {
    "plain": [{}, None, 1],
    "second layer": [{}, {"fp8_recipe": "mxfp8", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}, 0],
    "delayed": [{}, {"fp8_recipe": "delayed", "fp8": "hybrid"}, 2],
    "mxfp8 trained": [{}, {"fp8_recipe": "mxfp8"}, 1],
}
ON_LAYOUTS = {
    "delayed tp2": [{"tp": 2}, {"fp8_recipe": "delayed", "fp8": "hybrid"}, 2],
    "delayed tp2 sp": [{"tp": 2, "sp": True}, {"fp8_recipe": "delayed", "fp8": "hybrid"}, 2],
    "delayed dp2": [{}, {"fp8_recipe": "delayed", "fp8": "hybrid"}, 2],
    "delayed pp2": [{"pp": 2}, {"fp8_recipe": "delayed", "fp8": "hybrid"}, 2],
    "mxfp8 tp2 sp": [{"tp": 2, "sp": True}, {"fp8_recipe": "mxfp8"}, 1],
    "mxfp8 pp2": [{"pp": 2}, {"fp8_recipe": "mxfp8"}, 1],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy") / "model"
    make_model(directory, tied=False)
    return directory


@pytest.fixture(scope="module")
def found(model: Path, tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., None]) -> Found:
    """What each case's ranks wrote, by ``name.rank``."""
    output = tmp_path_factory.mktemp("out")
    launch(WORKER, model, output, json.dumps(CASES), num_processes=1)
    launch(WORKER, model, output, json.dumps(ON_LAYOUTS), num_processes=2)
    return {path.stem: load_file(path) for path in output.iterdir()}


@pytest.mark.parametrize(
    ("case", "recipe", "layers"),
    [*((recipe, recipe, (0, 1)) for recipe in FORWARD), ("second layer", "mxfp8", (1,))],
)
def test_a_model_s_log_probs_are_those_of_quantized_linears(
    case: str, recipe: str, layers: tuple[int, ...], model: Path, found: Found
) -> None:
    by_hand = Qwen3ForCausalLM.from_pretrained(model, attn_implementation="eager").float()
    quantize_linears(by_hand, recipe=recipe, layers=layers)
    mine, plain = found[f"{case}.0"], found["plain.0"]["logprobs.0"]
    wanted = whole_row(by_hand, mine)
    effect = (wanted - plain).abs().mean()
    # A value that stands at the middle of two numbers may go either way.
    assert (mine["logprobs.0"] - wanted).abs().mean() < 0.02 * effect
    assert effect > 1e-3, "the recipe changes nothing here, so nothing was compared"


def relative(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the gradients' difference, relative."""
    names = [name for name in other if name.startswith("gradient.")]
    assert names
    difference = sum(float((one[name].double() - other[name].double()).square().sum()) for name in names)
    return (difference / sum(float(other[name].double().square().sum()) for name in names)) ** 0.5


@pytest.mark.parametrize("name", [name for name in ON_LAYOUTS if "dp2" not in name])
def test_layouts_rehearse_the_same_gradients(name: str, found: Found) -> None:
    alone = "delayed" if name.startswith("delayed") else "mxfp8 trained"
    effect = relative(found[f"{alone}.0"], found["plain.0"])
    assert effect > 0.01
    assert relative(found[f"{name}.0"], found[f"{alone}.0"]) < 0.02 * effect


@pytest.mark.parametrize("name", ["delayed tp2", "delayed tp2 sp", "delayed dp2"])
def test_delayed_scales_agree_on_all_ranks_of_a_stage(name: str, found: Found) -> None:
    mine, theirs = (found[f"{name}.{rank}"]["scales"] for rank in (0, 1))
    assert len(mine) == 2 * 4 * 3
    assert (mine > 0).all()
    assert torch.equal(mine, theirs)
