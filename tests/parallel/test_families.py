"""Every supported family, on every kind of layout, against its class in transformers."""

from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, LENGTHS, make_family, token_ids
from family_worker import LAYOUTS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

WORKER = Path(__file__).with_name("family_worker.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, launch) -> Path:
    """A directory with every model, and what each layout made of it."""
    directory = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        make_family(name, directory / name, companions=tiny_model)
    pairs = [f"{layout}={directory / name}" for layout in LAYOUTS for name in FAMILIES]
    (directory / "out").mkdir()
    launch(WORKER, directory / "out", *pairs, num_processes=4, timeout_seconds=400)
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers_on_every_layout(name: str, outcomes: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(outcomes / name, attn_implementation="eager").double()
    with torch.no_grad():
        expected = torch.cat([model(ids[None]).logits[0] for ids in token_ids().split(LENGTHS)])
    for layout in LAYOUTS:
        logits = load_file(outcomes / "out" / f"{name}-{layout}.safetensors")["logits"]
        # float32 against float64: relative to the largest logit.
        error = float((logits.double() - expected).abs().max() / expected.abs().max())
        assert error < 1e-5, (layout, error)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_from_any_layout_is_the_source_bit_for_bit(name: str, outcomes: Path) -> None:
    source = outcomes / name
    weights = load_file(source / "model.safetensors")
    for layout in LAYOUTS:
        export = outcomes / "out" / f"{name}-{layout}"
        exported = load_file(export / "model.safetensors")
        assert exported.keys() == weights.keys()
        for key, weight in weights.items():
            assert exported[key].dtype == weight.dtype
            assert torch.equal(exported[key], weight), (layout, key)
        files = {path.name for path in source.iterdir()} - {"model.safetensors"}
        assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= files
        for file in files:
            assert (export / file).read_bytes() == (source / file).read_bytes(), (layout, file)
