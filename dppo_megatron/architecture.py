"""The architecture of a model, as its Hugging Face config.json states it.

What would change the mathematics and is not computed here is an error that names the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers of a dense decoder-only transformer, from its Hugging Face config.

    rope_theta: base of the rotary frequencies. qk_norm: RMS norms on queries and keys of each head.
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

    @property
    def attention_weight(self) -> float:
        """Cost of a squared token of length against the cost of a token, by multiplications in a layer."""
        width = self.num_attention_heads * self.head_dim
        projections = self.hidden_size * (2 * width + 2 * self.num_key_value_heads * self.head_dim)
        return width / (projections + 3 * self.hidden_size * self.ffn_hidden_size)

    def padded_vocab_size(self, tp: int) -> int:
        """Vocabulary rows, rounded up to a multiple of TP."""
        return -(-self.vocab_size // tp) * tp


_INERT_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0.0, None),
    "rope_scaling": (None,),
}
"""Fields of the Hugging Face config and the values that megatron-core's model here computes."""


_REQUIRED = (
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
    family = config.get("model_type")
    if family != "qwen3":
        raise ValueError(f"policy.model_name: model_type {family!r} is not supported; supported: 'qwen3'")
    for name, allowed in _INERT_FIELDS.items():
        if name in config and config[name] not in allowed:
            raise ValueError(
                f"policy.model_name: config.json has {name} = {config[name]!r}; supported: {allowed[0]!r}"
            )
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"policy.model_name: config.json has rope_type = {rope['rope_type']!r}; supported: 'default'"
        )
    if missing := [name for name in _REQUIRED if config.get(name) is None]:
        raise ValueError(f"policy.model_name: config.json lacks {', '.join(missing)}")
    heads, hidden, head_dim = config["num_attention_heads"], config["hidden_size"], config.get("head_dim")
    if head_dim is None and hidden % heads:
        raise ValueError(f"policy.model_name: config.json lacks head_dim, and {hidden} / {heads} leaves a remainder")
    return Architecture(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim or hidden // heads,
        ffn_hidden_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
        norm_epsilon=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
        qk_norm=True,
    )
