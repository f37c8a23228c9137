"""The section ``policy.generation``, with its defaults; the rest of the schema is in ``schema``."""

from dataclasses import dataclass, field
from typing import Any, Literal


def follows(key: str) -> Any:
    """A default that is another key's value, resolved when the configuration is loaded."""
    return "${" + key + "}"


@dataclass(frozen=True)
class VllmConfig:
    """``policy.generation.vllm_cfg``: the engine. ``precision`` fp8 is vLLM's quantization while it loads.

    gpu_memory_utilization: a GPU's share that the engine may take. enforce_eager: off the GPU always so.
    """

    precision: Literal["float32", "bfloat16", "fp8"] = follows("policy.precision")
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6
    max_model_len: int = follows("policy.max_total_sequence_length")
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True)
class GenerationConfig:
    """``policy.generation``: sampling; the temperature of validation is val_temperature, 0 being greedy.

    vllm_kwargs: passed on to vLLM's engine arguments as they are.
    """

    backend: Literal["vllm", "megatron"] = "vllm"
    max_new_tokens: int = follows("policy.max_total_sequence_length")
    temperature: float = 1.0
    val_temperature: float = follows("policy.generation.temperature")
    stop_token_ids: tuple[int, ...] | None = None
    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)
    vllm_kwargs: dict[str, Any] | None = None
