"""Transformer layers by Transformer Engine: fused norms and linears, FP8, its attention over THD rows.

Imported only where Transformer Engine is: ``device.has_transformer_engine`` decides.
"""

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron.parallel.layer_spec import rotate
from dppo_megatron.parallel.row_layout import RowLayout


class RotatedTeAttention(TEDotProductAttention):  # type: ignore[misc,valid-type]
    """Transformer Engine's attention, queries and keys rotated by the row's own angles first.

    The model has no rotary embedding of its own (``model.build_chunk``): as ``PackedAttention``, this one rotates.
    Context parallelism is Transformer Engine's, in the same zigzag order.
    """

    def forward(self, query: Tensor, key: Tensor, *rest: Any, packed_seq_params: Any = None, **options: Any) -> Any:
        """Attend within each sequence of the row.

        query: [T, heads, d]; key, value: [T, kv heads, d]; returns [T, heads * d].
        """
        row = packed_seq_params
        if not isinstance(row, RowLayout):
            raise ValueError(f"attention takes packed rows only: packed_seq_params is {type(row).__name__}")
        query, key = rotate(query, row), rotate(key, row)
        return super().forward(query, key, *rest, packed_seq_params=row, **options)


def te_block_spec(config: TransformerConfig, *, num_layers: int) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, by Transformer Engine."""
    layer: Any = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer.submodules.self_attention.submodules.core_attention = RotatedTeAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)  # type: ignore[arg-type]
