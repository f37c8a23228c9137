"""The architecture of a model, as its Hugging Face config.json states it.

What would change the mathematics and is not computed here is an error that names the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are slowed for contexts longer than those of pre-training.

    kind: ``linear`` divides all by ``factor``; ``llama3`` only those whose wavelength exceeds
    ``original_max_positions / low_freq_factor``, blending up to ``original_max_positions / high_freq_factor``.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers of a dense decoder-only transformer, from its Hugging Face config.

    rope_theta: base of the rotary frequencies. qk_norm: RMS norms on queries and keys of each head.
    qkv_bias: a bias on the query, key and value projections, and on no other.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied: bool
    rope_theta: float
    norm_epsilon: float
    max_positions: int
    qk_norm: bool
    qkv_bias: bool = False
    rope_scaling: RopeScaling | None = None

    @property
    def attention_weight(self) -> float:
        """Cost of a squared token of length against the cost of a token, by multiplications in a layer."""
        width = self.num_attention_heads * self.head_dim
        projections = self.hidden_size * (2 * width + 2 * self.num_key_value_heads * self.head_dim)
        return width / (projections + 3 * self.hidden_size * self.ffn_hidden_size)

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary rows, rounded up to a multiple of TP."""
        return -(-self.vocab_size // tp) * tp


@dataclass(frozen=True, slots=True)
class _Family:
    """One ``model_type``. neutral: values of its own fields that are computed; required: fields with no neutral
    default in transformers; default_head_dim: None for hidden size over heads."""

    model_class: str
    qk_norm: bool = False
    qkv_bias: bool = False
    default_head_dim: int | None = None
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    required: tuple[str, ...] = ()


_NO_WINDOW = {"use_sliding_window": (False, None)}
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family(
        "MistralForCausalLM",
        neutral={"sliding_window": (None,)},
        required=("sliding_window", "num_key_value_heads"),
    ),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True, neutral=_NO_WINDOW, required=("num_key_value_heads",)),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        qk_norm=True,
        default_head_dim=128,
        neutral=_NO_WINDOW,
        required=("num_key_value_heads",),
    ),
}
_MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "llama4", "deepseek_v3")

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "partial_rotary_factor": (1.0, None),
    "logit_scale": (1.0, None),
    "logits_scaling": (1.0, None),
    "embedding_multiplier": (1.0, None),
    "residual_multiplier": (1.0, None),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "quantization_config": (None,),
    "auto_map": (None,),
}
"""Fields of config.json, whatever the family, and the values that are computed here. ``auto_map`` names code of the
model's own, which is never run."""

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a Hugging Face ``config.json``.

    Raises ValueError that names the field, its value and what is supported.
    """
    family = _family(config)
    for name, allowed in {**_NEUTRAL, **family.neutral}.items():
        if name in config and config[name] not in allowed:
            raise _unsupported(name, config[name], repr(allowed[0]))
    if unusual := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise _unsupported("layer_types", sorted(unusual), "'full_attention'")
    missing = [name for name in _SIZES if config.get(name) is None]
    missing += [name for name in family.required if name not in config]
    if missing:
        raise ValueError(f"policy.model_name: config.json lacks {', '.join(missing)}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = config.get("num_key_value_heads") or heads
    if heads % groups:
        raise _unsupported("num_key_value_heads", groups, f"a divisor of num_attention_heads = {heads}")
    head_dim = config.get("head_dim") or family.default_head_dim
    if head_dim is None and hidden % heads:
        raise ValueError(f"policy.model_name: config.json lacks head_dim, and {hidden} / {heads} leaves a remainder")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return Architecture(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim or hidden // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        norm_epsilon=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        rope_scaling=_rope_scaling(rope),
    )


def _family(config: Mapping[str, Any]) -> _Family:
    name = str(config.get("model_type"))
    supported = ", ".join(map(repr, _FAMILIES))
    if name in _MIXTURES:
        raise ValueError(
            f"policy.model_name: model_type {name!r} is a mixture of experts, which is not trained here; "
            f"supported: {supported}"
        )
    if name not in _FAMILIES:
        raise ValueError(f"policy.model_name: model_type {name!r} is not supported; supported: {supported}")
    family = _FAMILIES[name]
    if unusual := set(config.get("architectures") or ()) - {family.model_class}:
        raise _unsupported("architectures", sorted(unusual), repr(family.model_class))
    return family


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    allowed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in allowed:
        raise _unsupported("rope_type", kind, "'default', 'linear', 'llama3'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    read = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *allowed[kind]}
    if unknown := sorted(set(rope) - read):
        raise _unsupported("rope_scaling", dict(rope), f"{kind!r} without {', '.join(unknown)}")
    if missing := [name for name in allowed[kind] if rope.get(name) is None]:
        raise ValueError(f"policy.model_name: config.json has rope_type = {kind!r} without {', '.join(missing)}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    if not 0 < low < high:
        raise _unsupported("low_freq_factor, high_freq_factor", (low, high), "0 < low < high")
    return RopeScaling("llama3", float(rope["factor"]), low, high, int(rope["original_max_position_embeddings"]))


def _unsupported(name: str, value: object, supported: str) -> ValueError:
    return ValueError(f"policy.model_name: config.json has {name} = {value!r}; supported: {supported}")
