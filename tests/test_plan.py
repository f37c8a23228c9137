"""Claims about the plan: layouts, padding, batch arithmetic, and the configurations that are refused."""

import itertools
from dataclasses import replace
from typing import Literal

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from dppo_megatron.architecture import Architecture, read_architecture
from dppo_megatron.config.fp8 import Fp8Config
from dppo_megatron.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    DppoConfig,
    GrpoConfig,
    MegatronConfig,
    PolicyConfig,
    RolloutConfig,
    TrainDatasetConfig,
)
from dppo_megatron.plan import (
    BatchArithmetic,
    Layout,
    batch_arithmetic,
    check_layout,
    layers_of_chunks,
    padding_multiples,
    resolve_layout,
    rows_multiple,
    samples_with_vllm,
    token_alignment,
)

HF_CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SHAPE = read_architecture(HF_CONFIG)


def layout(*, tp: int = 1, pp: int = 1, cp: int = 1, sp: bool = False) -> Layout:
    return Layout(tp=tp, pp=pp, cp=cp, dp=1, sequence_parallel=sp)


def accepts(
    shape: Architecture,
    *,
    tp: int = 1,
    pp: int = 1,
    virtual_pp: int = 1,
    first: int | None = None,
    last: int | None = None,
) -> bool:
    megatron = MegatronConfig(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
    try:
        check_layout(shape, layout=replace(layout(tp=tp, pp=pp), virtual_pp=virtual_pp), megatron=megatron)
    except ValueError:
        return False
    return True


def megatron_accepts(**sizes: int | None) -> bool:
    try:
        TransformerConfig(hidden_size=64 * 12, **sizes)  # pyright: ignore[reportArgumentType]
    except ValueError:
        return False
    return True


def test_data_parallelism_takes_what_the_other_axes_leave() -> None:
    megatron = MegatronConfig(tensor_model_parallel_size=2, context_parallel_size=2, pipeline_model_parallel_size=3)
    resolved = resolve_layout(ClusterConfig(gpus_per_node=8, num_nodes=6), megatron=megatron, virtual_pp=1)
    assert resolved == Layout(tp=2, pp=3, cp=2, dp=4, sequence_parallel=False)
    assert resolved.world_size == 48


def test_processes_that_no_replica_divides_are_an_error_with_keys_and_values() -> None:
    megatron = MegatronConfig(tensor_model_parallel_size=4, context_parallel_size=3)
    with pytest.raises(ValueError) as caught:
        resolve_layout(ClusterConfig(gpus_per_node=8), megatron=megatron, virtual_pp=1)
    assert str(caught.value) == (
        "cluster.gpus_per_node = 8: times cluster.num_nodes = 1 must be a positive multiple of "
        "policy.megatron_cfg.tensor_model_parallel_size * pipeline_model_parallel_size * "
        "context_parallel_size = 4 * 1 * 3"
    )


def test_sequence_parallelism_means_nothing_without_tensor_parallelism() -> None:
    cluster = ClusterConfig(gpus_per_node=2)
    alone = MegatronConfig(sequence_parallel=True)
    assert not resolve_layout(cluster, megatron=alone, virtual_pp=1).sequence_parallel
    both = MegatronConfig(sequence_parallel=True, tensor_model_parallel_size=2)
    assert resolve_layout(cluster, megatron=both, virtual_pp=1).sequence_parallel


def test_heads_are_cut_as_megatron_core_cuts_them() -> None:
    for heads, groups, tp in itertools.product((12, 24), (1, 2, 3, 4, 6, 12), (1, 2, 3, 4, 6, 8, 12)):
        shape = replace(SHAPE, num_attention_heads=heads, num_key_value_heads=groups, ffn_hidden_size=24)
        theirs = megatron_accepts(
            num_layers=1, num_attention_heads=heads, num_query_groups=groups, tensor_model_parallel_size=tp
        )
        assert accepts(shape, tp=tp) == theirs, (heads, groups, tp)


def test_layers_are_cut_as_megatron_core_cuts_them() -> None:
    for pp, first, last in itertools.product((2, 3, 4), (None, 0, 1, 3, 5), (None, 1, 2)):
        if first is None and last is None:
            continue
        theirs = megatron_accepts(
            num_layers=7,
            num_attention_heads=12,
            pipeline_model_parallel_size=pp,
            pipeline_dtype="bfloat16",  # pyright: ignore[reportArgumentType]
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        ours = accepts(replace(SHAPE, num_layers=7), pp=pp, first=first, last=last)
        assert ours == theirs, (pp, first, last)


def interleaved(
    num_layers: int, *, pp: int, virtual_pp: int, first: int | None, last: int | None
) -> dict[str, object]:
    """megatron-core's settings of interleaved stages; by kind, for its constructor."""
    return {
        "num_layers": num_layers,
        "num_attention_heads": 12,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": virtual_pp,
        "pipeline_dtype": "bfloat16",
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
    }


def test_interleaved_chunks_are_cut_as_megatron_core_cuts_them() -> None:
    num_accepted = 0
    sizes = itertools.product((8, 12, 16), (2, 3, 4), (2, 3, 4), (None, 2, 4), (None, 2, 3, 4))
    for num_layers, pp, virtual_pp, first, last in sizes:
        settings = interleaved(num_layers, pp=pp, virtual_pp=virtual_pp, first=first, last=last)
        cut = {"pp": pp, "virtual_pp": virtual_pp, "first": first, "last": last}
        ours = accepts(replace(SHAPE, num_layers=num_layers), **cut)  # pyright: ignore[reportArgumentType]
        if pp == 2 and None not in (first, last):
            assert not ours, "megatron-core divides by the number of stages between the first and the last"
        elif first is not None or last is not None:
            # Of even stages megatron-core looks only when it builds the model.
            assert ours == megatron_accepts(**settings), settings  # pyright: ignore[reportArgumentType]
        if not ours:
            continue
        num_accepted += 1
        megatron = MegatronConfig(
            pipeline_model_parallel_size=pp,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
        config = TransformerConfig(hidden_size=64 * 12, **settings)  # pyright: ignore[reportArgumentType]
        stages = layers_of_chunks(num_layers, megatron=megatron, virtual_pp=virtual_pp)
        for rank, number in itertools.product(range(pp), range(virtual_pp)):
            start = get_transformer_layer_offset(config, number, rank)
            count = get_num_layers_to_build(config, number, rank)
            assert stages[rank][number] == tuple(range(start, start + count)), (settings, rank, number)
    assert num_accepted > 10


def test_a_stage_that_its_chunks_do_not_divide_is_an_error_naming_both() -> None:
    with pytest.raises(ValueError) as caught:
        check_layout(SHAPE, layout=replace(layout(tp=2, pp=2), virtual_pp=5), megatron=MegatronConfig())
    assert str(caught.value) == ("dppo.virtual_pipeline_stages = 5: must divide the 12 layers of a stage")


def test_interleaved_stages_alone_take_rows_in_groups() -> None:
    assert rows_multiple(layout(pp=4)) == 1
    assert rows_multiple(replace(layout(pp=4), virtual_pp=2)) == 4


def test_more_layers_at_the_ends_than_the_model_has_are_an_error() -> None:
    assert not accepts(replace(SHAPE, num_layers=7), pp=3, first=6, last=2)


def test_a_model_that_does_not_divide_is_an_error_naming_every_size() -> None:
    with pytest.raises(ValueError) as caught:
        check_layout(
            replace(SHAPE, ffn_hidden_size=10),
            layout=layout(tp=4, pp=5),
            megatron=MegatronConfig(),
        )
    heads, ffn, layers = str(caught.value).splitlines()
    start = "policy.megatron_cfg.tensor_model_parallel_size = 4: must divide the model's "
    assert heads == f"{start}num_attention_heads, 14"
    assert ffn == f"{start}ffn_hidden_size, 10"
    assert layers.startswith("policy.megatron_cfg.pipeline_model_parallel_size = 5: ")
    assert "24 layers" in layers


def test_padding_is_the_least_that_can_be_cut() -> None:
    axes = itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (False, True), (1, 16))
    for cp, tp, sp, alignment in axes:
        multiples = padding_multiples(layout(tp=tp, cp=cp, sp=sp), alignment=alignment)
        # Halves of 2 * cp chunks a rank; the rank's share again by tp, and by the alignment each.
        sequence = next(n for n in range(1, 1000) if cp == 1 or n % (2 * cp) == 0)
        share = cp * (tp if sp else 1)
        row = next(
            n for n in range(1, 10_000) if n % sequence == 0 and n % share == 0 and (n // share) % alignment == 0
        )
        assert (multiples.sequence, multiples.row) == (sequence, row), (cp, tp, sp, alignment)


def test_optimizer_steps_divide_the_unpruned_batch() -> None:
    grpo = GrpoConfig(num_prompts_per_step=12, num_generations_per_prompt=4)
    arithmetic = batch_arithmetic(grpo, train_global_batch_size=16)
    assert arithmetic == BatchArithmetic(num_prompts=12, num_generations=4, num_minibatches=3)
    assert (arithmetic.num_sequences, arithmetic.prompts_per_minibatch, arithmetic.on_policy) == (48, 4, False)
    assert batch_arithmetic(grpo, train_global_batch_size=48).on_policy


@pytest.mark.parametrize("size", [0, 6, 32, 96])
def test_a_batch_that_does_not_divide_into_whole_groups_is_an_error(size: int) -> None:
    grpo = GrpoConfig(num_prompts_per_step=12, num_generations_per_prompt=4)
    with pytest.raises(ValueError, match=r"policy\.train_global_batch_size = .*12 \* 4"):
        batch_arithmetic(grpo, train_global_batch_size=size)


def refused_in_fp8(shape: Architecture, *, tp: int, fp8: Fp8Config) -> str:
    try:
        check_layout(shape, layout=layout(tp=tp), megatron=MegatronConfig(fp8_cfg=fp8))
    except ValueError as error:
        return str(error)
    return ""


def test_sizes_that_a_recipe_cannot_take_are_refused_with_the_key_to_change() -> None:
    # 4864 / 2 = 2432 = 152 * 16 = 76 * 32; 392 / 2 = 196 is no multiple of 16.
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        assert refused_in_fp8(SHAPE, tp=2, fp8=Fp8Config(enabled=True, fp8_recipe=recipe)) == ""
    narrow = replace(SHAPE, ffn_hidden_size=392)
    assert refused_in_fp8(narrow, tp=2, fp8=Fp8Config()) == ""
    message = refused_in_fp8(narrow, tp=2, fp8=Fp8Config(enabled=True))
    assert "ffn_hidden_size / tensor parallel size is 196" in message
    assert "policy.megatron_cfg.fp8_cfg.fp8_recipe = 'blockwise'" in message
    assert "multiples of 16" in message
    odd = replace(SHAPE, hidden_size=880)  # 55 * 16
    assert refused_in_fp8(odd, tp=1, fp8=Fp8Config(enabled=True, fp8_recipe="tensorwise")) == ""
    assert "hidden_size is 880" in refused_in_fp8(odd, tp=1, fp8=Fp8Config(enabled=True, fp8_recipe="mxfp8"))


def test_a_layer_must_be_left_in_fp8() -> None:
    ends = Fp8Config(enabled=True, first_last_layers_bf16=True, num_layers_at_start_in_bf16=23)
    assert "leaves none of the model's 24 layers" in refused_in_fp8(SHAPE, tp=1, fp8=ends)
    assert refused_in_fp8(SHAPE, tp=1, fp8=replace(ends, num_layers_at_start_in_bf16=22)) == ""


@pytest.mark.parametrize(
    ("recipe", "multiple"), [("delayed", 16), ("tensorwise", 16), ("blockwise", 128), ("mxfp8", 32)]
)
def test_rows_are_padded_so_that_each_rank_s_tokens_suit_the_recipe(recipe: str, multiple: int) -> None:
    assert token_alignment(Fp8Config(fp8_recipe=recipe)) == 1, "no FP8, no padding"  # type: ignore[arg-type]
    alignment = token_alignment(Fp8Config(enabled=True, fp8_recipe=recipe))  # type: ignore[arg-type]
    row = padding_multiples(layout(tp=2, cp=2, sp=True), alignment=alignment).row
    assert row // (2 * 2) % multiple == 0
    assert row == 4 * multiple


@pytest.mark.parametrize(
    ("engine", "on_gpu", "replay_dir", "vllm"),
    [
        ("auto", True, None, True),
        ("auto", False, None, False),
        ("vllm", False, None, True),
        ("embedded", True, None, False),
        ("vllm", True, "samples", False),
    ],
)
def test_auto_samples_with_vllm_on_gpus_alone(
    engine: Literal["auto", "embedded", "vllm"], on_gpu: bool, replay_dir: str | None, vllm: bool
) -> None:
    config = Config(
        policy=PolicyConfig(model_name="m"),
        data=DataConfig(train=TrainDatasetConfig(data_path="d")),
        dppo=DppoConfig(rollout=RolloutConfig(engine=engine, replay_dir=replay_dir)),
    )
    assert samples_with_vllm(config, on_gpu=on_gpu) is vllm
