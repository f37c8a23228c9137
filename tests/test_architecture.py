"""Claims about what is read from a model's config.json, and what is refused there."""

import pytest

from dppo_megatron.architecture import Architecture, RopeScaling, read_architecture

HF_CONFIG = {
    "model_type": "qwen3",
    "head_dim": 64,
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


def test_the_sizes_are_those_of_the_hugging_face_config() -> None:
    assert read_architecture(HF_CONFIG) == Architecture(
        num_layers=24,
        hidden_size=896,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        ffn_hidden_size=4864,
        vocab_size=151936,
        tied=True,
        rope_theta=1e6,
        norm_epsilon=1e-6,
        max_positions=4096,
        qk_norm=True,
    )


def test_what_may_be_left_out_has_hugging_face_s_meaning() -> None:
    assert read_architecture(HF_CONFIG | {"head_dim": 128}).head_dim == 128
    assert read_architecture(HF_CONFIG | {"num_key_value_heads": None}).num_key_value_heads == 14
    older = {key: value for key, value in HF_CONFIG.items() if key != "rope_parameters"} | {"rope_theta": 5e5}
    assert read_architecture(older).rope_theta == 5e5


def test_every_missing_size_is_named() -> None:
    partial = {key: HF_CONFIG[key] for key in HF_CONFIG if key not in ("vocab_size", "rms_norm_eps")}
    with pytest.raises(ValueError, match="lacks vocab_size, rms_norm_eps"):
        read_architecture(partial)


def test_a_head_size_that_cannot_be_derived_is_required() -> None:
    with pytest.raises(ValueError, match="head_dim"):
        read_architecture(changed("llama", head_dim=None, num_attention_heads=13, num_key_value_heads=13))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mamba"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("rope_scaling", {"rope_type": "yarn"}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e6}),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match="rope_type" if field.startswith("rope") else field):
        read_architecture(HF_CONFIG | {field: value})


def test_the_attention_s_weight_is_the_ratio_of_multiplications() -> None:
    # A layer: q, k, v, out and the gated feed-forward per token; scores and values per pair, half by causality.
    architecture = read_architecture(HF_CONFIG)
    per_token = 896 * (14 * 64 + 2 * 2 * 64) + 14 * 64 * 896 + 3 * 896 * 4864
    per_pair = 2 * 14 * 64 / 2
    assert architecture.attention_weight == pytest.approx(per_pair / per_token)


def changed(family: str, **fields: object) -> dict[str, object]:
    """The config of another family, with fields changed."""
    return HF_CONFIG | {"model_type": family} | fields


def test_families_differ_in_biases_norms_and_head_size() -> None:
    qwen2 = read_architecture(changed("qwen2"))
    assert (qwen2.qkv_bias, qwen2.qk_norm) == (True, False)
    llama = read_architecture(changed("llama"))
    assert (llama.qkv_bias, llama.qk_norm) == (False, False)
    mistral = read_architecture(changed("mistral", sliding_window=None))
    assert (mistral.qkv_bias, mistral.qk_norm) == (False, False)
    without = {key: value for key, value in HF_CONFIG.items() if key != "head_dim"}
    # transformers' own default, which is not hidden size over heads.
    assert read_architecture(without).head_dim == 128
    assert read_architecture(without | {"model_type": "llama"}).head_dim == 64


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("mistral", sliding_window=4096), "sliding_window = 4096"),
        (changed("mistral"), "lacks sliding_window"),
        (changed("qwen3_moe"), "'qwen3_moe' is a mixture of experts"),
        (changed("llama", mlp_bias=True), "mlp_bias"),
        (changed("llama", architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (changed("llama", quantization_config={"bits": 4}), "quantization_config"),
        (changed("llama", auto_map={"AutoModel": "x.y"}), "auto_map"),
        (changed("llama", partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        (changed("qwen2", layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        (changed("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0}), "rope_type = 'dynamic'"),
        (changed("llama", rope_parameters={"rope_type": "llama3", "factor": 8.0}), "without low_freq_factor"),
        (changed("llama", rope_parameters={"rope_type": "linear", "factor": 8.0, "beta_fast": 1}), "beta_fast"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_architecture(config)


def test_llama_3_1_s_scaling_is_read_in_both_spellings() -> None:
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    numbers["original_max_position_embeddings"] = 8192
    older = changed("llama", rope_scaling=numbers | {"type": "llama3"}, rope_parameters=None, rope_theta=5e5)
    newer = changed("llama", rope_parameters=numbers | {"rope_type": "llama3", "rope_theta": 5e5})
    assert read_architecture(older).rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert read_architecture(older) == read_architecture(newer)
