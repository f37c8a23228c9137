"""Hugging Face names and layouts of a model's weights, and megatron-core's: one pure table, no tensors."""

from dataclasses import dataclass
from enum import Enum

from dppo_megatron.architecture import Architecture


class Fusion(Enum):
    """How Hugging Face tensors make up one megatron-core tensor."""

    PLAIN = "one tensor, as it is"
    QKV = "for each kv head: its query heads, its key head, its value head"
    GATE_UP = "gate then up, within each tensor-parallel shard"
    VOCABULARY = "rows padded to a multiple of TP with zeros"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One megatron-core parameter.

    name: in the whole model, layers counted from 0. hf_names: the tensors it is made of, in order of fusion.
    shape: full, before tensor-parallel sharding. tp_dim: the dimension that tensor parallelism shards, or None.
    layer: None for the embedding (first stage), the final norm and the output layer (last stage).
    """

    name: str
    hf_names: tuple[str, ...]
    shape: tuple[int, ...]
    tp_dim: int | None
    fusion: Fusion = Fusion.PLAIN
    layer: int | None = None

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        return tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))


_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine keeps a norm in the linear that follows it; all its other names are the table's."""


def table_name(name: str) -> str:
    """The table's name of a parameter of either layer spec."""
    for fused, plain in _FUSED_NORMS.items():
        if name.endswith(f".{fused}"):
            return name.removesuffix(fused) + plain
    return name


def model_parameters(architecture: Architecture, *, tp: int) -> tuple[Parameter, ...]:
    """Every parameter of the whole model, from the embedding to the output layer: the order of a weight stream.

    A tied model has no output layer of its own.
    """
    vocabulary = (architecture.padded_vocab_size(tp), architecture.hidden_size)
    parameters = [
        Parameter(
            "embedding.word_embeddings.weight",
            ("model.embed_tokens.weight",),
            vocabulary,
            0,
            Fusion.VOCABULARY,
        )
    ]
    for layer in range(architecture.num_layers):
        parameters += _layer_parameters(architecture, layer)
    parameters.append(
        Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), (architecture.hidden_size,), None)
    )
    if not architecture.tied:
        parameters.append(Parameter("output_layer.weight", ("lm_head.weight",), vocabulary, 0, Fusion.VOCABULARY))
    return tuple(parameters)


def streamed_names(architecture: Architecture) -> frozenset[str]:
    """The Hugging Face tensors of a weight stream: a tied output layer comes under its own name as well."""
    names = {name for parameter in model_parameters(architecture, tp=1) for name in parameter.hf_names}
    return frozenset(names | {"lm_head.weight"})


def _layer_parameters(architecture: Architecture, layer: int) -> list[Parameter]:
    megatron, hugging_face = f"decoder.layers.{layer}", f"model.layers.{layer}"
    hidden, ffn, head_dim = architecture.hidden_size, architecture.ffn_hidden_size, architecture.head_dim
    query_size = architecture.num_attention_heads * head_dim
    qkv_size = query_size + 2 * architecture.num_key_value_heads * head_dim

    def row(
        name: str,
        hf_names: tuple[str, ...],
        shape: tuple[int, ...],
        tp_dim: int | None = None,
        fusion: Fusion = Fusion.PLAIN,
        kind: str = "weight",
    ) -> Parameter:
        full_names = tuple(f"{hugging_face}.{part}.{kind}" for part in hf_names)
        return Parameter(f"{megatron}.{name}.{kind}", full_names, shape, tp_dim, fusion, layer)

    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    rows = [
        row("input_layernorm", ("input_layernorm",), (hidden,)),
        row("self_attention.linear_qkv", projections, (qkv_size, hidden), 0, Fusion.QKV),
        row("self_attention.linear_proj", ("self_attn.o_proj",), (hidden, query_size), 1),
        row("pre_mlp_layernorm", ("post_attention_layernorm",), (hidden,)),
        row("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"), (2 * ffn, hidden), 0, Fusion.GATE_UP),
        row("mlp.linear_fc2", ("mlp.down_proj",), (hidden, ffn), 1),
    ]
    if architecture.qkv_bias:
        rows.append(row("self_attention.linear_qkv", projections, (qkv_size,), 0, Fusion.QKV, "bias"))
    if architecture.qk_norm:
        rows.append(row("self_attention.q_layernorm", ("self_attn.q_norm",), (head_dim,)))
        rows.append(row("self_attention.k_layernorm", ("self_attn.k_norm",), (head_dim,)))
    return rows
