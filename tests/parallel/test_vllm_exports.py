"""A converted and exported model of every family loads in vLLM at once; skipped without vLLM (make test-vllm)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, LENGTHS, make_family, token_ids
from transformers import AutoModelForCausalLM
from vllm_export_worker import NUM_TOKENS

from dppo_megatron.conversion import Model, convert_to_hf, convert_to_megatron

pytest.importorskip("vllm")

WORKER = Path(__file__).with_name("vllm_export_worker.py")
# vLLM's attention on CPUs has head sizes of 32 and more. The initial range keeps logits apart, not huge.
SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.1}


def silent(done: int, total: int) -> None:
    """No progress bar."""


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[Path, dict[str, Any]]:
    """The source models, and what vLLM made of their exports."""
    root = tmp_path_factory.mktemp("exports")
    for name in FAMILIES:
        make_family(name, root / "source" / name, companions=tiny_model, **SIZES)
        convert_to_megatron(
            Model.open(root / "source" / name), root / "megatron" / name, layout=None, progress=silent
        )
        convert_to_hf(Model.open(root / "megatron" / name), root / "export" / name, progress=silent)
    directories = [root / "export" / name for name in FAMILIES]
    subprocess.run([sys.executable, WORKER, root / "found.json", *directories], check=True, timeout=600)
    return root, json.loads((root / "found.json").read_text())


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_an_export_generates_in_vllm_what_its_source_does_in_transformers(
    name: str, exports: tuple[Path, dict[str, Any]]
) -> None:
    root, found = exports
    model = AutoModelForCausalLM.from_pretrained(root / "source" / name)
    for prompt, tokens in zip(token_ids().split(LENGTHS), found[name]["tokens"], strict=True):
        ids = prompt.tolist()
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert tokens == ids[len(prompt) :]
    assert found[name]["chat_template"] == "{{ messages[0].content }}"
