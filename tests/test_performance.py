import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dppo_megatron import metric_names
from dppo_megatron.architecture import read_architecture
from dppo_megatron.performance import StepPerformance, training_flops
from dppo_megatron.stage_clock import StageSeconds

CONFIG = Qwen3Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
ARCHITECTURE = read_architecture(CONFIG.to_dict())


@pytest.mark.parametrize("length", [1, 7, 64])
def test_the_count_is_that_of_the_model_s_own_matrix_products(length: int) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, counter = Qwen3ForCausalLM(CONFIG), FlopCounterMode(display=False)
    model.set_attn_implementation("eager")
    with torch.no_grad(), counter:
        model(torch.zeros(1, length, dtype=torch.long))
    # Eager attention computes the whole square; causal attention is counted by half, rotary tables not at all.
    square = 3 * 2 * 2 * (4 * 16) * length**2
    rotary = counter.get_total_flops() - square - (training_flops(ARCHITECTURE, np.array([length])) / 3 - square / 2)
    assert 0 <= rotary <= 2 * 16 * length


def test_sequences_attend_to_themselves_alone() -> None:
    one, two = training_flops(ARCHITECTURE, np.array([20])), training_flops(ARCHITECTURE, np.array([10, 10]))
    assert one - two == 3 * 2 * 3 * 64 * (20**2 - 2 * 10**2)


def test_rates_are_work_over_the_seconds_of_its_stage() -> None:
    lengths = np.array([10, 30])
    performance = StepPerformance.of(
        ARCHITECTURE,
        trained_lengths=lengths,
        rollout_tokens=600,
        seconds=StageSeconds(rollout=2.0, update=0.5, validation=9.0, checkpoint=9.0, other=0.5),
        num_processes=2,
        peak_flops=1e9,
    )
    flops = training_flops(ARCHITECTURE, lengths) / 0.5
    assert performance == StepPerformance(300.0, 80.0, 200.0, flops, flops / 2e9)


def test_without_a_known_peak_no_utilisation_is_logged_and_an_empty_update_is_no_division_by_zero() -> None:
    performance = StepPerformance.of(
        ARCHITECTURE,
        trained_lengths=np.zeros(0, np.int64),
        rollout_tokens=0,
        seconds=StageSeconds(),
        num_processes=1,
        peak_flops=None,
    )
    assert performance.metrics()[metric_names.TRAIN_FLOPS_PER_SECOND] == 0
    assert metric_names.TRAIN_UTILISATION not in performance.metrics()
