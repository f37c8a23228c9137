"""Transformer layers for megatron-core where Transformer Engine is absent: norm and attention in plain torch.

megatron-core's local spec refuses two things that training needs: its norm wrapper refuses sequence parallelism,
and its dot-product attention refuses packed (THD) sequences. Both are replaced through the public ModuleSpec.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own convention)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron import device
from dppo_megatron.parallel.row_layout import RowLayout


class RmsNorm(torch.nn.Module):
    """Root-mean-square norm whose weight takes part in the gradient sum of sequence parallelism.

    Under sequence parallelism every tensor-parallel rank normalises its own tokens, so the weight's gradient is
    partial on each; ``finalize_model_grads`` sums those marked ``sequence_parallel`` over the axis.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device.current()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise the last dimension, in float32."""
        return F.rms_norm(hidden.float(), self.weight.shape, None, self.eps).to(hidden.dtype) * self.weight


class PackedAttention(MegatronModule):
    """Causal attention over THD rows by torch's scaled_dot_product_attention: GQA, context parallelism, rotation.

    What all layers share of a row (which sequences attend in one call, rotary angles) comes in its ``RowLayout``.
    With context parallelism keys and values are all-gathered and every rank's queries attend by their true
    positions.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        assert config.attention_dropout == 0, "dropout would make log-probs of two passes differ"
        assert config.kv_channels is not None
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each sequence of the row.

        query: [T, heads, d]; key, value: [T, kv heads, d]; returns [T, heads, d].
        """
        row = packed_seq_params
        if not isinstance(row, RowLayout):
            raise ValueError(f"attention takes packed rows only: packed_seq_params is {type(row).__name__}")
        query, key = rotate(query, row), rotate(key, row)
        if row.order is not None:
            key, value = (self._gather(part).index_select(0, row.order) for part in (key, value))
        key_tokens = [batch.keys.num_tokens for batch in row.batches]
        outputs = [
            batch.queries.unpad(
                self._attend(batch.queries.pad(q), batch.keys.pad(k), batch.keys.pad(v), mask=batch.mask)
            )
            for batch, q, k, v in zip(
                row.batches,
                query.split([batch.queries.num_tokens for batch in row.batches]),
                key.split(key_tokens),
                value.split(key_tokens),
                strict=True,
            )
        ]
        return torch.cat(outputs)

    def _gather(self, part: Tensor) -> Tensor:
        return gather_from_sequence_parallel_region(part, group=self.cp_group)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
        out = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (query, key, value)),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.size(2) != key.size(2),
        )
        return out.transpose(1, 2)


def rotate(heads: Tensor, row: RowLayout) -> Tensor:
    """Rotate [T, heads, d] by the angles of its tokens, in the halves' order of Hugging Face's models."""
    assert row.cosines is not None
    assert row.sines is not None
    first, second = heads.chunk(2, dim=-1)
    cosines, sines = row.cosines.to(heads.dtype), row.sines.to(heads.dtype)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def local_block_spec(config: TransformerConfig, *, num_layers: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, without Transformer Engine."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    _replace_norms_and_attention(layer, qk_norm=config.qk_layernorm)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RmsNorm)  # type: ignore[arg-type]


def _replace_norms_and_attention(layer: ModuleSpec, *, qk_norm: bool) -> None:
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
