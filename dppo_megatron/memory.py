"""Device memory of a run, from its sizes alone: pure, no torch. The formulas are told in docs/sizing.md.

They are those of the layers that run without Transformer Engine, which keep the most; checked against what
autograd and megatron-core's buffers really hold in tests/test_memory.py.
"""

from dataclasses import dataclass

from dppo_megatron.architecture import Architecture
from dppo_megatron.config.schema import PolicyConfig
from dppo_megatron.plan import Layout, layers_of_chunks

_BYTES = {"float32": 4, "bfloat16": 2}
_MOMENTS, _MAIN_PARAMETER = 8, 4


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on each GPU of one pipeline stage.

    weights: held throughout. gradients, optimizer: likewise, unless they are set aside for rollouts: set_aside is the
    sum of the two then, else 0. activations, logits: during the update, of the fullest row. rollout_weights: held
    throughout by the embedded engine; by vLLM (engine_sleeps) from the weights' stream to the end of the rollouts.
    kv_cache: during rollouts, at most; 0 for vLLM, which takes the rest of its share of the GPU.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    rollout_weights: int
    kv_cache: int
    set_aside: int = 0
    engine_sleeps: bool = False

    @property
    def update_peak(self) -> int:
        """Bytes while training: all but the cache, and what an engine that sleeps does not hold."""
        engine = 0 if self.engine_sleeps else self.rollout_weights
        return self.weights + self.gradients + self.optimizer + engine + self.activations + self.logits

    @property
    def stream_peak(self) -> int:
        """Bytes while the weights go to the engine: its own, and all of the trainer but activations and logits."""
        return self.weights + self.gradients + self.optimizer + self.rollout_weights

    @property
    def rollout_peak(self) -> int:
        """Bytes while sampling: those of the stream and the cache, without what is set aside."""
        return self.stream_peak + self.kv_cache - self.set_aside

    @property
    def peak(self) -> int:
        """The largest of the three."""
        return max(self.update_peak, self.stream_peak, self.rollout_peak)


@dataclass(frozen=True, slots=True)
class StageShape:
    """What one pipeline stage holds: layers, embedding, output layer.

    in_flight: rows at once, at most; of interleaved stages, where a row is in one chunk at a time, a fraction.
    """

    num_layers: int
    is_first: bool
    is_last: bool
    in_flight: float


def stage_shapes(architecture: Architecture, policy: PolicyConfig, *, layout: Layout) -> tuple[StageShape, ...]:
    """The stages in order; an earlier stage starts more rows before the first gradient comes back to it.

    Source: ``megatron.core.pipeline_parallel.schedules``, 1F1B, and ``get_pp_rank_microbatches`` where interleaved.
    """
    pp, virtual_pp = layout.pp, layout.virtual_pp
    stages = layers_of_chunks(architecture.num_layers, megatron=policy.megatron_cfg, virtual_pp=virtual_pp)
    later = 1 if virtual_pp == 1 else 2
    return tuple(
        StageShape(
            sum(map(len, chunks)),
            is_first=stage == 0,
            is_last=stage == pp - 1,
            in_flight=((pp - 1 - stage) * later + (virtual_pp - 1) * pp + 1) / virtual_pp,
        )
        for stage, chunks in enumerate(stages)
    )


def estimate_memory(
    architecture: Architecture,
    policy: PolicyConfig,
    *,
    layout: Layout,
    max_cache_tokens: int | None,
    sets_aside: bool = False,
) -> tuple[StageMemory, ...]:
    """Bytes on a GPU of each pipeline stage, in order.

    max_cache_tokens: of the embedded engine; None for vLLM. sets_aside: gradients and optimizer make way for
    rollouts.
    """
    width = _BYTES[policy.precision]
    whole = sum(parameters(architecture, StageShape(architecture.num_layers, True, True, 1), tp=1))
    engine_tp = 1 if max_cache_tokens is not None else policy.generation.vllm_cfg.tensor_parallel_size
    cache = 2 * architecture.num_layers * architecture.num_key_value_heads * architecture.head_dim
    stages = []
    for stage in stage_shapes(architecture, policy, layout=layout):
        count = sum(parameters(architecture, stage, tp=layout.tp))
        gradients, optimizer = count * gradient_bytes(policy), round(count * optimizer_bytes(policy, layout=layout))
        stages.append(
            StageMemory(
                weights=count * width,
                gradients=gradients,
                optimizer=optimizer,
                activations=activation_bytes(architecture, policy, stage, layout=layout),
                logits=_logit_bytes(architecture, policy, layout=layout) if stage.is_last else 0,
                rollout_weights=whole * width // engine_tp,
                kv_cache=(max_cache_tokens or 0) * cache * width,
                set_aside=gradients + optimizer if sets_aside else 0,
                engine_sleeps=max_cache_tokens is None,
            )
        )
    return tuple(stages)


def parameters(architecture: Architecture, stage: StageShape, *, tp: int) -> tuple[int, int, int]:
    """Parameters of a stage on one tensor-parallel rank: layers, embedding, output layer with its norm."""
    hidden, head_dim = architecture.hidden_size, architecture.head_dim
    # With fewer key-value heads than ranks, several ranks hold each.
    kv_heads = max(architecture.num_key_value_heads // tp, 1)
    heads = architecture.num_attention_heads // tp
    biases = head_dim * (heads + 2 * kv_heads) if architecture.qkv_bias else 0
    norms = 2 * head_dim if architecture.qk_norm else 0
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads) + biases + norms
    layer = attention + 3 * hidden * (architecture.ffn_hidden_size // tp) + 2 * hidden
    table = architecture.padded_vocab_size(tp) // tp * hidden
    # A tied table is held twice where the first and the last stage are two.
    output = hidden + (0 if architecture.tied and stage.is_first else table)
    return layer * stage.num_layers, table if stage.is_first else 0, output if stage.is_last else 0


def gradient_bytes(policy: PolicyConfig) -> int:
    """Bytes of the gradient of a parameter."""
    reduced = policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32
    return 4 if reduced else _BYTES[policy.precision]


def optimizer_bytes(policy: PolicyConfig, *, layout: Layout) -> float:
    """Bytes of the optimizer's state of a parameter of this rank: two moments, and a float32 copy beside bfloat16.

    Source: Megatron-LM's distributed optimizer guide: with bfloat16, 16 bytes a parameter with its weight and
    gradient (4 + 12 / d when sharded), 18 with float32 gradients (6 + 12 / d).
    """
    state = _MOMENTS + (_MAIN_PARAMETER if policy.precision != "float32" else 0)
    return state / (layout.dp * layout.cp if policy.megatron_cfg.optimizer.use_distributed_optimizer else 1)


def activation_bytes(architecture: Architecture, policy: PolicyConfig, stage: StageShape, *, layout: Layout) -> int:
    """Bytes that autograd keeps of the fullest rows, all those in flight; logits not counted.

    Recomputing whole layers keeps each layer's input, and one layer at a time in full. Recomputing parts saves
    too little here to count: what attention keeps is its inputs.
    """
    width, megatron = _BYTES[policy.precision], policy.megatron_cfg
    tokens = policy.sequence_packing.train_mb_tokens // layout.cp
    # Sequence parallelism shards what tensor parallelism leaves whole.
    whole = architecture.hidden_size / (layout.tp if layout.sequence_parallel else 1)
    norm = whole * (4 + 2 * width)
    layer = 2 * norm + _projection_bytes(architecture, tp=layout.tp, width=width)
    final = norm if stage.is_last else 0
    if megatron.activation_checkpointing and megatron.recompute_granularity == "full":
        return round(tokens * (stage.in_flight * stage.num_layers * whole * width + layer + final))
    return round(tokens * stage.in_flight * (stage.num_layers * layer + final))


def _projection_bytes(architecture: Architecture, *, tp: int, width: int) -> float:
    """Bytes a token that a layer keeps beside its norms: attention, rotary tables, feed-forward."""
    heads = architecture.num_attention_heads * architecture.head_dim / tp
    kv_heads = max(architecture.num_key_value_heads / tp, 1) * architecture.head_dim
    attention = heads * (4 + 4 * width) + kv_heads * (8 + 2 * width) + 4 * architecture.head_dim * width
    return attention + 5 * width * architecture.ffn_hidden_size / tp


def saved_logit_bytes(architecture: Architecture, policy: PolicyConfig, *, layout: Layout) -> int:
    """Bytes of the logits that autograd keeps of a row."""
    columns = architecture.padded_vocab_size(layout.tp) // layout.tp
    return policy.sequence_packing.train_mb_tokens // layout.cp * columns * _BYTES[policy.precision]


def _logit_bytes(architecture: Architecture, policy: PolicyConfig, *, layout: Layout) -> int:
    """The logits, their gradient, and three float32 copies of one chunk."""
    saved = saved_logit_bytes(architecture, policy, layout=layout)
    tokens = policy.sequence_packing.train_mb_tokens // layout.cp
    chunk = min(policy.logprob_chunk_size or tokens, tokens)
    return 2 * saved + 3 * 4 * chunk * (architecture.padded_vocab_size(layout.tp) // layout.tp)
