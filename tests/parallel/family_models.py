"""A small random model of every supported family, made by transformers, with a tokenizer and its companions."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 61
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _sizes(changes: dict[str, Any]) -> dict[str, Any]:
    return _SIZES | changes


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_sizes(changes)))


def _mistral(**changes: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_sizes({"head_dim": 16, "sliding_window": None} | changes)))


def _qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_sizes(changes)))


def _qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_sizes({"head_dim": 16} | changes)))


_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3": partial(_qwen3, tie_word_embeddings=False),
    "qwen3_tied": partial(_qwen3, tie_word_embeddings=True),
    "qwen2": partial(_qwen2, tie_word_embeddings=False),
    "qwen2_tied": partial(_qwen2, tie_word_embeddings=True),
    "llama2": partial(_llama, num_key_value_heads=4),
    "llama31": partial(_llama, rope_parameters=_LLAMA3),
    "llama_linear": partial(_llama, rope_parameters=_LINEAR),
    "smollm2": partial(_llama, tie_word_embeddings=True),
    "mistral": _mistral,
}


def make_family(
    name: str, directory: Path, *, companions: Path, dtype: torch.dtype = torch.float32, **changes: Any
) -> None:
    """Write a random model of a family: norms and biases are random too, so that none can be forgotten.

    companions: a model's directory, whose tokenizer and generation settings are copied. changes: of its
    configuration.
    """
    torch.manual_seed(sum(name.encode()))
    model = FAMILIES[name](**changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    torch.nn.Module.to(model, dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(companions / file, directory / file)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")


def token_ids() -> torch.Tensor:
    """Two sequences of different lengths, one beyond the context before rope scaling, int64 [n] each, as one row."""
    return torch.randint(0, VOCAB_SIZE, (120,), generator=torch.Generator().manual_seed(5))


LENGTHS = (97, 23)
