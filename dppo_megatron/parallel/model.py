"""The policy's network: a megatron-core GPTModel of a Hugging Face architecture, the chunks of this rank."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from dppo_megatron import device
from dppo_megatron.architecture import Architecture
from dppo_megatron.config.fp8 import Fp8Config
from dppo_megatron.config.schema import MegatronConfig
from dppo_megatron.parallel.fp8_rehearsal import Fp8Rehearsal, rehearse
from dppo_megatron.parallel.layer_spec import local_block_spec
from dppo_megatron.parallel.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""``policy.precision`` -> parameters' type."""


def transformer_config(
    architecture: Architecture,
    megatron: MegatronConfig,
    *,
    precision: str,
    virtual_pp: int,
    rehearse_fp8: bool = False,
) -> TransformerConfig:
    """megatron-core's configuration of the model; fusions only where a GPU can run them.

    rehearse_fp8: FP8 is ``build_chunk``'s to emulate, and megatron-core knows nothing of it.
    """
    dtype, gpu = DTYPES[precision], device.has_gpu()
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        ffn_hidden_size=architecture.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_pp if virtual_pp > 1 else None,
        # In one batch of four messages two interleaved stages could not tell what goes forward from what goes back.
        overlap_p2p_comm=virtual_pp > 1,
        batch_p2p_comm=virtual_pp == 1,
        context_parallel_size=megatron.context_parallel_size,
        sequence_parallel=megatron.sequence_parallel and megatron.tensor_model_parallel_size > 1,
        num_layers_in_first_pipeline_stage=megatron.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=megatron.num_layers_in_last_pipeline_stage,
        use_cpu_initialization=not gpu,
        # The values are overwritten, but initialising is also what marks parameters as tensor-parallel: without
        # the marks the gradient norm counts the shards of one rank only.
        perform_initialization=True,
        # Rows differ in length, so stages announce shapes; megatron-core then demands "alltoall" of dense models too.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The loss is a sum; the one division, by our own denominator, is in the policy.
        calculate_per_token_loss=True,
        bias_activation_fusion=megatron.bias_activation_fusion and gpu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=gpu,
        **_recompute_settings(megatron),
        **({} if rehearse_fp8 else _fp8_settings(megatron.fp8_cfg)),
    )


def _recompute_settings(megatron: MegatronConfig) -> dict[str, Any]:
    if not megatron.activation_checkpointing:
        return {}
    if megatron.recompute_granularity == "full":
        method = {"recompute_method": "uniform", "recompute_num_layers": 1}
    else:
        method = {"recompute_modules": list(megatron.recompute_modules or ["core_attn"])}
    return {"recompute_granularity": megatron.recompute_granularity, **method}


def _fp8_settings(fp8: Fp8Config) -> dict[str, Any]:
    if not fp8.enabled:
        return {}
    return {
        "fp8": fp8.fp8,
        "fp8_recipe": fp8.fp8_recipe,
        "fp8_param": fp8.fp8_param,
        "first_last_layers_bf16": fp8.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": fp8.num_layers_at_start_in_bf16 if fp8.first_last_layers_bf16 else 0,
        "num_layers_at_end_in_bf16": fp8.num_layers_at_end_in_bf16 if fp8.first_last_layers_bf16 else 0,
    }


def block_spec(config: TransformerConfig, *, num_layers: int, local: bool = False) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage: Transformer Engine's where it can run, else, or where ``local``, plain torch.

    Raises: ValueError for FP8 without Transformer Engine.
    """
    if device.has_transformer_engine() and not local:
        from dppo_megatron.parallel.te_layer_spec import te_block_spec

        return te_block_spec(config, num_layers=num_layers)
    if config.fp8:
        raise ValueError(
            "policy.megatron_cfg.fp8_cfg.enabled = True: needs a GPU and Transformer Engine (pip install "
            "transformer-engine[pytorch]); `dppo doctor` says what is missing, dppo.fp8_emulate: true rehearses it"
        )
    return local_block_spec(config, num_layers=num_layers)


def build_chunk(
    architecture: Architecture,
    config: TransformerConfig,
    *,
    mesh: Mesh,
    number: int,
    num_layers: int,
    rehearsed: Fp8Config | None = None,
) -> GPTModel:
    """Chunk ``number`` of this rank's, of so many layers, its parameters not yet given values.

    rehearsed: the FP8 recipe that its linears emulate, on layers of plain torch.
    """
    virtual_pp = mesh.layout.virtual_pp
    layers = block_spec(config, num_layers=num_layers, local=rehearsed is not None)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=layers,  # type: ignore[arg-type]
        vocab_size=architecture.padded_vocab_size(mesh.tp.size),
        max_sequence_length=architecture.max_positions,
        pre_process=mesh.pp.is_first and number == 0,
        post_process=mesh.pp.is_last and number == virtual_pp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=architecture.tied,
        # The attention rotates, by angles worked out once a row: megatron-core's loops over a row's sequences.
        position_embedding_type="none",
        pg_collection=mesh.groups,
        vp_stage=number if virtual_pp > 1 else None,
    ).to(device.current())
    if rehearsed is not None:
        rehearse(chunk, Fp8Rehearsal(rehearsed, config, amax_axis=mesh.stage))
    return chunk
