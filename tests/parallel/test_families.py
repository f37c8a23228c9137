"""Every supported family, on every kind of layout, against its class in transformers."""

from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, LENGTHS, make_family, token_ids
from family_worker import LAYOUTS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dppo_megatron.conversion import Model, convert_to_hf, convert_to_megatron
from dppo_megatron.parallel.sharded_files import TargetLayout

WORKER = Path(__file__).with_name("family_worker.py")
CONVERTED = ("qwen2_tied", "qwen3")
"""Families that are also loaded from converted checkpoints, of a layout other than the trainer's."""
FORMATS = {"torch_dist": None, "sharded": TargetLayout(tp=2, pp=2, virtual_pp=2)}
CASES = [(name, name) for name in FAMILIES] + [(f"{name}-{kind}", name) for name in CONVERTED for kind in FORMATS]


def silent(done: int, total: int) -> None:
    """No progress bar."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, launch) -> Path:
    """A directory with every model, and what each layout made of it."""
    directory = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        make_family(name, directory / name, companions=tiny_model)
    for name in CONVERTED:
        for kind, layout in FORMATS.items():
            model = Model.open(directory / name)
            convert_to_megatron(model, directory / f"{name}-{kind}", layout=layout, progress=silent)
    # Layout by layout: process groups are made once each.
    pairs = [f"{layout}={directory / case}" for layout in LAYOUTS for case, _ in CASES if layout in layouts_of(case)]
    (directory / "out").mkdir()
    launch(WORKER, directory / "out", *pairs, num_processes=4, timeout_seconds=600)
    return directory


def layouts_of(case: str) -> list[str]:
    """The layouts that a source was loaded on."""
    return [layout for layout in LAYOUTS if case in FAMILIES or layout in ("tp1", "tp2pp2")]


@pytest.mark.parametrize(("case", "name"), CASES)
def test_logits_are_those_of_transformers_on_every_layout(case: str, name: str, outcomes: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(outcomes / name, attn_implementation="eager").double()
    with torch.no_grad():
        expected = torch.cat([model(ids[None]).logits[0] for ids in token_ids().split(LENGTHS)])
    for layout in layouts_of(case):
        logits = load_file(outcomes / "out" / f"{case}-{layout}.safetensors")["logits"]
        # Logits are of size 4; float32 against float64.
        torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("case", "name"), CASES)
def test_an_export_from_any_layout_is_the_source_bit_for_bit(case: str, name: str, outcomes: Path) -> None:
    for layout in layouts_of(case):
        assert_same_model(outcomes / "out" / f"{case}-{layout}", outcomes / name)


def test_megatron_core_reads_a_converted_checkpoint_and_its_own_converts_back(outcomes: Path, tmp_path: Path) -> None:
    # It was read, strictly, by every rank of the worker, which then saved it from TP2 x PP2.
    convert_to_hf(Model.open(outcomes / "out" / "checkpoint"), tmp_path / "back", progress=silent)
    assert_same_model(tmp_path / "back", outcomes / "qwen2_tied")


def assert_same_model(export: Path, source: Path) -> None:
    """Equal tensors, types, and files beside them."""
    weights, exported = load_file(source / "model.safetensors"), load_file(export / "model.safetensors")
    assert exported.keys() == weights.keys()
    for key, weight in weights.items():
        assert exported[key].dtype == weight.dtype
        assert torch.equal(exported[key], weight), (export.name, key)
    files = {path.name for path in source.iterdir()} - {"model.safetensors"}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= files
    for file in files:
        assert (export / file).read_bytes() == (source / file).read_bytes(), (export.name, file)
