"""What a configuration comes to before anything runs: layout, batch arithmetic, padding, refusals."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dppo_megatron.architecture import Architecture
from dppo_megatron.config.fp8 import Fp8Config
from dppo_megatron.config.schema import ClusterConfig, Config, GrpoConfig, MegatronConfig

_MEGATRON = "policy.megatron_cfg"

# Key, and what is allowed there.
Problems = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the mesh's axes; sequence_parallel is false where tp is 1, which leaves nothing to shard.

    virtual_pp: chunks of layers that each pipeline stage holds, which take turns (the interleaved schedule).
    """

    tp: int
    pp: int
    cp: int
    dp: int
    sequence_parallel: bool
    virtual_pp: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.cp * self.dp


def resolve_layout(cluster: ClusterConfig, *, megatron: MegatronConfig, virtual_pp: int) -> Layout:
    """Divide the cluster's processes over the axes; data parallelism takes what the others leave.

    Raises: ValueError when a model replica's size does not divide the number of processes.
    """
    problems = layout_problems(cluster, megatron=megatron)
    raise_problems(f"{key} = {cluster.gpus_per_node}: {allowed}" for key, allowed in problems)
    tp, pp, cp = _model_axes(megatron)
    dp = cluster.gpus_per_node * cluster.num_nodes // (tp * pp * cp)
    return Layout(tp, pp, cp, dp, sequence_parallel=megatron.sequence_parallel and tp > 1, virtual_pp=virtual_pp)


def _model_axes(megatron: MegatronConfig) -> tuple[int, int, int]:
    return (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )


def layout_problems(cluster: ClusterConfig, *, megatron: MegatronConfig) -> Problems:
    """What is wrong with the number of processes for a model replica's size: key and what is allowed."""
    tp, pp, cp = _model_axes(megatron)
    processes = cluster.gpus_per_node * cluster.num_nodes
    if min(tp, pp, cp, processes) < 1 or processes % (tp * pp * cp):
        yield (
            "cluster.gpus_per_node",
            f"times cluster.num_nodes = {cluster.num_nodes} must be a positive multiple of "
            f"{_MEGATRON}.tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size "
            f"= {tp} * {pp} * {cp}",
        )


def check_layout(shape: Architecture, *, layout: Layout, megatron: MegatronConfig) -> None:
    """Check that the model can be cut as the layout asks.

    Raises: ValueError naming every size that does not divide.
    """
    raise_problems(
        [
            *_tensor_problems(shape, tp=layout.tp),
            *_stage_problems(shape, pp=layout.pp, virtual_pp=layout.virtual_pp, megatron=megatron),
            *_fp8_problems(shape, tp=layout.tp, fp8=megatron.fp8_cfg),
        ]
    )


def _tensor_problems(shape: Architecture, *, tp: int) -> Iterator[str]:
    start = f"{_MEGATRON}.tensor_model_parallel_size = {tp}: must divide the model's"
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(shape, name) % tp:
            yield f"{start} {name}, {getattr(shape, name)}"
    # With fewer key-value heads than ranks megatron-core lets several ranks share each.
    if shape.num_key_value_heads % tp and tp % shape.num_key_value_heads:
        yield f"{start} num_key_value_heads, {shape.num_key_value_heads}, or be a multiple of it"


def _stage_problems(shape: Architecture, *, pp: int, virtual_pp: int, megatron: MegatronConfig) -> Iterator[str]:
    layers, stages = shape.num_layers, pp
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        size = getattr(megatron, name)
        if size is not None:
            layers, stages = layers - size, stages - 1
            if size < 1:
                yield f"{_MEGATRON}.{name} = {size}: must be at least 1, or null"
            elif size % virtual_pp:
                yield f"dppo.virtual_pipeline_stages = {virtual_pp}: must divide {_MEGATRON}.{name}, {size}"
    if layers == stages == 0:
        if virtual_pp > 1:
            # megatron-core would divide by the number of stages between the two.
            yield (
                f"dppo.virtual_pipeline_stages = {virtual_pp}: with two pipeline stages only one of {_MEGATRON}."
                "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage may be set"
            )
        return
    if layers < 1 or stages < 1 or layers % stages:
        yield (
            f"{_MEGATRON}.pipeline_model_parallel_size = {pp}: must divide the model's {shape.num_layers} layers; "
            f"num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage leave {layers} for "
            f"{stages} stages"
        )
    elif layers // stages % virtual_pp:
        yield (f"dppo.virtual_pipeline_stages = {virtual_pp}: must divide the {layers // stages} layers of a stage")


def layers_of_chunks(
    num_layers: int, *, megatron: MegatronConfig, virtual_pp: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The layers of each pipeline stage's chunks, stage by stage, of a model that ``check_layout`` accepts.

    A row passes the first chunks of all stages, then the second ones, and so on. Source:
    ``megatron.core.transformer.transformer_layer.get_transformer_layer_offset``.
    """
    pp = megatron.pipeline_model_parallel_size
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    fixed = {0: first, pp - 1: last} if pp > 1 else {}
    counts = [fixed.get(stage) for stage in range(pp)]
    left = num_layers - sum(count or 0 for count in counts)
    each = left // max(sum(count is None for count in counts), 1)
    per_chunk = [(each if count is None else count) // virtual_pp for count in counts]
    bounds = list(itertools.accumulate(per_chunk * virtual_pp, initial=0))
    assert bounds[-1] == num_layers
    chunks = [tuple(range(*ends)) for ends in itertools.pairwise(bounds)]
    return tuple(tuple(chunks[stage::pp]) for stage in range(pp))


def rows_multiple(layout: Layout) -> int:
    """What the rows of a data-parallel rank must be a multiple of: interleaved stages take them in groups of PP.

    Source: ``megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving``.
    """
    return layout.pp if layout.virtual_pp > 1 else 1


@dataclass(frozen=True, slots=True)
class PaddingMultiples:
    """What each sequence and each row is padded to, tokens."""

    sequence: int
    row: int


def padding_multiples(layout: Layout, *, alignment: int = 1, sequence_divisor: int = 1) -> PaddingMultiples:
    """The least paddings that the layout can cut.

    Context parallelism cuts each sequence into 2 * cp chunks; sequence parallelism cuts a rank's tokens by
    tp. alignment: what the tokens that one rank holds must divide by (FP8), tokens. sequence_divisor: what the
    configuration wants each sequence to divide by, tokens; it is raised to what the layout needs too.
    """
    sequence = math.lcm(sequence_divisor, 2 * layout.cp if layout.cp > 1 else 1)
    shards = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    return PaddingMultiples(sequence=sequence, row=math.lcm(sequence, alignment * shards))


_SIZE_ALIGNMENT = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
_TOKEN_ALIGNMENT = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
"""What a weight's dimensions on one rank, and a rank's tokens, must divide by for each FP8 recipe. Source:
Transformer Engine's ``assert_dim_for_fp8_exec`` and the quantizers' ``is_quantizable``; nothing there checks when a
model is built, and what does not divide fails in the first step, or is silently not quantised."""


def token_alignment(fp8: Fp8Config) -> int:
    """What the tokens that one rank holds must divide by."""
    return _TOKEN_ALIGNMENT[fp8.fp8_recipe] if fp8.enabled else 1


def _fp8_problems(shape: Architecture, *, tp: int, fp8: Fp8Config) -> Iterator[str]:
    if not fp8.enabled:
        return
    multiple = _SIZE_ALIGNMENT[fp8.fp8_recipe]
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    sizes = {
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size / tensor parallel size": shape.ffn_hidden_size // tp,
        "num_attention_heads * head_dim / tensor parallel size": shape.num_attention_heads * shape.head_dim // tp,
        "query, key and value rows / tensor parallel size": heads * shape.head_dim // tp,
    }
    for name, size in sizes.items():
        if size % multiple:
            yield (
                f"{_MEGATRON}.fp8_cfg.fp8_recipe = {fp8.fp8_recipe!r}: needs multiples of {multiple}, and "
                f"{name} is {size}; use another recipe, a smaller {_MEGATRON}.tensor_model_parallel_size, or no FP8"
            )
    start, end = fp8.num_layers_at_start_in_bf16, fp8.num_layers_at_end_in_bf16
    if fp8.first_last_layers_bf16 and start + end >= shape.num_layers:
        yield (
            f"{_MEGATRON}.fp8_cfg.num_layers_at_start_in_bf16 = {start}: with num_layers_at_end_in_bf16 = {end} it "
            f"leaves none of the model's {shape.num_layers} layers in FP8"
        )


def samples_with_vllm(config: Config, *, on_gpu: bool) -> bool:
    """Whether rollouts are vLLM's: as ``dppo.rollout.engine`` says, and by ``auto`` on GPUs alone."""
    rollout = config.dppo.rollout
    wanted = rollout.engine == "vllm" or (rollout.engine == "auto" and on_gpu)
    return wanted and rollout.replay_dir is None


def sets_training_aside(config: Config) -> bool:
    """Whether gradients and optimizer state leave a GPU while vLLM samples on it.

    In float32 the optimizer holds the model's parameters themselves, which the weights' stream still needs.
    """
    return samples_with_vllm(config, on_gpu=True) and config.policy.precision == "bfloat16"


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """How one step's candidates, before any pruning, become optimizer steps."""

    num_prompts: int
    num_generations: int
    num_minibatches: int

    @property
    def num_sequences(self) -> int:
        """Completions of a step's candidates."""
        return self.num_prompts * self.num_generations

    @property
    def prompts_per_minibatch(self) -> int:
        """Candidates of each optimizer step."""
        return self.num_prompts // self.num_minibatches

    @property
    def on_policy(self) -> bool:
        """Whether the rollouts' weights are those of every update: one optimizer step a rollout batch."""
        return self.num_minibatches == 1


def batch_arithmetic(grpo: GrpoConfig, *, train_global_batch_size: int) -> BatchArithmetic:
    """Divide the unpruned prompts * generations into optimizer steps of whole groups.

    Raises: ValueError when they do not divide.
    """
    problems = batch_problems(grpo, train_global_batch_size=train_global_batch_size)
    raise_problems(f"{key} = {train_global_batch_size}: {allowed}" for key, allowed in problems)
    prompts, generations = grpo.num_prompts_per_step, grpo.num_generations_per_prompt
    return BatchArithmetic(prompts, generations, prompts * generations // train_global_batch_size)


def batch_problems(grpo: GrpoConfig, *, train_global_batch_size: int) -> Problems:
    """What is wrong with the batch sizes: key and what is allowed."""
    prompts, generations = grpo.num_prompts_per_step, grpo.num_generations_per_prompt
    sizes = (prompts, generations, train_global_batch_size)
    if min(sizes) < 1 or prompts * generations % sizes[2] or sizes[2] % generations:
        yield (
            "policy.train_global_batch_size",
            "must divide grpo.num_prompts_per_step * grpo.num_generations_per_prompt = "
            f"{prompts} * {generations}, and be a multiple of grpo.num_generations_per_prompt",
        )


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one ValueError with a line a problem, if there are any."""
    lines = list(problems)
    if lines:
        raise ValueError("\n".join(lines))
