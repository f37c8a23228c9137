"""Claims about the memory model: what small models really hold, and Megatron's documented bytes a parameter."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from memory_worker import CASES, VIRTUAL_PP, policy_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from dppo_megatron.architecture import Architecture, read_architecture
from dppo_megatron.config.generation_schema import GenerationConfig, VllmConfig
from dppo_megatron.config.schema import DistributedDataParallelConfig, PolicyConfig
from dppo_megatron.known_models import known_config
from dppo_megatron.memory import (
    StageShape,
    activation_bytes,
    estimate_memory,
    gradient_bytes,
    optimizer_bytes,
    parameters,
    saved_logit_bytes,
    stage_shapes,
)
from dppo_megatron.plan import Layout
from tests.conftest import Launch

WORKER = Path(__file__).with_name("memory_worker.py")
WHOLE = Layout(tp=1, pp=1, cp=1, dp=1, sequence_parallel=False)


def layout_of(policy: PolicyConfig, *, world_size: int) -> Layout:
    megatron = policy.megatron_cfg
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    return Layout(tp, pp, 1, world_size // (tp * pp), sequence_parallel=megatron.sequence_parallel)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of four layers, large enough that no constant matters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    directory = tmp_path_factory.mktemp("memory") / "model"
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def measured(model: Path, launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case on two processes, in one launch."""
    directory = tmp_path_factory.mktemp("measured")
    launch(WORKER, model, directory / "bytes", *CASES, num_processes=2)
    return directory


@pytest.mark.parametrize("case", CASES)
def test_what_a_small_model_holds_is_within_ten_percent_of_the_estimate(
    case: str, model: Path, measured: Path
) -> None:
    policy = policy_of(str(model), **CASES[case])  # pyright: ignore[reportArgumentType]
    policy = replace(policy, sequence_packing=replace(policy.sequence_packing, train_mb_tokens=512))
    layout = replace(layout_of(policy, world_size=2), virtual_pp=VIRTUAL_PP.get(case, 1))
    architecture = read_architecture(json.loads((model / "config.json").read_text()))
    estimates = estimate_memory(architecture, policy, layout=layout, max_cache_tokens=0)
    for rank in range(2):
        held = json.loads((measured / f"bytes.{case}.{rank}").read_text())
        stage = rank if layout.pp == 2 else 0
        estimate, shape = estimates[stage], stage_shapes(architecture, policy, layout=layout)[stage]
        activations = activation_bytes(architecture, policy, shape, layout=layout)
        if shape.is_last and not policy.megatron_cfg.activation_checkpointing:
            activations += saved_logit_bytes(architecture, policy, layout=layout)
        assert estimate.weights == pytest.approx(held["weights"], rel=0.1)
        assert estimate.gradients == pytest.approx(held["gradients"], rel=0.1)
        assert estimate.optimizer == pytest.approx(held["optimizer"], rel=0.1)
        assert activations == pytest.approx(held["activations"], rel=0.1)


@pytest.mark.parametrize(
    ("fp32_gradients", "sharded", "dp", "expected"),
    [(False, False, 1, 16), (True, False, 1, 18), (False, True, 8, 4 + 12 / 8), (True, True, 8, 6 + 12 / 8)],
)
def test_bytes_a_parameter_are_those_that_megatron_documents(
    fp32_gradients: bool, sharded: bool, dp: int, expected: float
) -> None:
    policy = policy_of("x", precision="bfloat16", sharded=sharded)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=fp32_gradients)
    policy = replace(policy, megatron_cfg=replace(policy.megatron_cfg, distributed_data_parallel_config=settings))
    layout = replace(WHOLE, dp=dp)
    assert 2 + gradient_bytes(policy) + optimizer_bytes(policy, layout=layout) == expected


def architecture_of(name: str) -> Architecture:
    known = known_config(name)
    assert known is not None
    return read_architecture(known[0])


@pytest.mark.parametrize(
    ("name", "billions"),
    [("0.6B", 0.596), ("1.7B", 1.721), ("4B", 4.022), ("8B", 8.191), ("14B", 14.768), ("32B", 32.762)],
)
def test_parameters_of_public_models_are_as_published(name: str, billions: float) -> None:
    architecture = architecture_of(f"Qwen/Qwen3-{name}")
    whole = StageShape(architecture.num_layers, is_first=True, is_last=True, in_flight=1)
    assert sum(parameters(architecture, whole, tp=1)) == pytest.approx(billions * 1e9, rel=1e-3)


def test_an_8b_model_s_training_state_is_what_the_documented_bytes_give() -> None:
    policy = policy_of("x", precision="bfloat16", sharded=True, tensor_model_parallel_size=2)
    layout = Layout(tp=2, pp=1, cp=1, dp=4, sequence_parallel=True)
    (stage,) = estimate_memory(architecture_of("Qwen/Qwen3-8B"), policy, layout=layout, max_cache_tokens=0)
    documented = 8.191e9 / 2 * (4 + 12 / 4)
    assert stage.weights + stage.gradients + stage.optimizer == pytest.approx(documented, rel=0.01)


def test_stages_share_the_layers_and_tensor_ranks_the_rest() -> None:
    architecture = architecture_of("Qwen/Qwen3-8B")
    whole = sum(parameters(architecture, StageShape(36, True, True, 1), tp=1))
    first, last = (sum(parameters(architecture, StageShape(18, end == 0, end == 1, 1), tp=1)) for end in (0, 1))
    assert first + last == whole
    eighth = sum(parameters(architecture, StageShape(36, True, True, 1), tp=8))
    assert eighth == pytest.approx(whole / 8, rel=1e-3)


def test_what_is_set_aside_leaves_the_peak_of_rollouts_alone() -> None:
    architecture = architecture_of("Qwen/Qwen3-8B")
    policy, layout = PolicyConfig(model_name="m"), Layout(1, 1, 1, 8, sequence_parallel=False)
    held, freed = (
        estimate_memory(architecture, policy, layout=layout, max_cache_tokens=10**6, sets_aside=aside)[0]
        for aside in (False, True)
    )
    assert held.set_aside == 0
    assert freed.set_aside == held.gradients + held.optimizer
    assert freed.update_peak == held.update_peak
    assert held.rollout_peak - freed.rollout_peak == freed.set_aside


def test_vllm_holds_its_own_cut_of_the_weights_and_nothing_during_the_update() -> None:
    architecture = architecture_of("Qwen/Qwen3-8B")
    layout = Layout(2, 1, 1, 4, sequence_parallel=True)
    generation = GenerationConfig(vllm_cfg=VllmConfig(tensor_parallel_size=2))
    policy = PolicyConfig(model_name="m", generation=generation)
    (embedded,) = estimate_memory(architecture, policy, layout=layout, max_cache_tokens=10**6)
    (vllm,) = estimate_memory(architecture, policy, layout=layout, max_cache_tokens=None)
    assert vllm.rollout_weights == embedded.rollout_weights // 2
    assert vllm.kv_cache == 0
    assert embedded.update_peak - vllm.update_peak == embedded.rollout_weights
    assert vllm.stream_peak == vllm.weights + vllm.gradients + vllm.optimizer + vllm.rollout_weights
    assert vllm.peak == max(vllm.update_peak, vllm.stream_peak)
