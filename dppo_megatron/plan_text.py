"""A run's plan as people read it, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from dppo_megatron.plan import rows_multiple
from dppo_megatron.run_plan import RunPlan

_GIB, _MIB = 2**30, 2**20
_MAX_RANKS = 16


def plan_json(plan: RunPlan) -> dict[str, Any]:
    """The plan as plain values; memory in bytes, by pipeline stage."""
    arithmetic, layout = plan.arithmetic, plan.layout
    return {
        "files": [str(file) for file in plan.loaded.files],
        "config": plan.loaded.effective,
        "warnings": [str(warning) for warning in plan.warnings],
        "model": {"source": plan.model_source, **(asdict(plan.architecture) if plan.architecture else {})},
        "layout": {**asdict(layout), "world_size": layout.world_size},
        "ranks": [asdict(rank) for rank in plan.ranks],
        "batch": {
            "num_prompts": arithmetic.num_prompts,
            "num_generations": arithmetic.num_generations,
            "num_sequences": arithmetic.num_sequences,
            "optimizer_steps": arithmetic.num_minibatches,
            "on_policy": arithmetic.on_policy,
        },
        "padding": asdict(plan.padding),
        "savings": asdict(plan.savings),
        "memory": [{**asdict(stage), "peak": stage.peak} for stage in plan.memory],
        "launch": list(plan.launch),
    }


def plan_text(plan: RunPlan) -> str:
    """The plan, section by section."""
    sections = (_files, _warnings, _data, _model, _layout, _batch, _padding, _savings, _memory, _launch)
    return "\n".join(line for section in sections for line in section(plan))


def _files(plan: RunPlan) -> Iterator[str]:
    yield "configuration  " + " <- ".join(str(file) for file in reversed(plan.loaded.files))


def _warnings(plan: RunPlan) -> Iterator[str]:
    if plan.warnings:
        yield f"warnings       {len(plan.warnings)}"
        yield from (f"  {warning}" for warning in plan.warnings)


def _data(plan: RunPlan) -> Iterator[str]:
    data = plan.loaded.config.data
    held_out = data.train.split_validation_size if data.validation is None else 0
    yield f"data           {data.train.data_path}" + (f", {held_out:.0%} of it for validation" if held_out else "")
    if data.validation is not None:
        yield f"  validation   {data.validation.data_path}"


def _model(plan: RunPlan) -> Iterator[str]:
    name = plan.loaded.config.policy.model_name
    if plan.architecture is None:
        yield f"model          {name}; its sizes are not known here"
        return
    sizes = plan.architecture
    yield f"model          {name}, sizes from {plan.model_source}"
    yield (
        f"  {sizes.num_layers} layers, hidden {sizes.hidden_size}, {sizes.num_attention_heads} heads, "
        f"{sizes.num_key_value_heads} key-value heads, feed-forward {sizes.ffn_hidden_size}, "
        f"vocabulary {sizes.vocab_size}"
    )
    if (fp8 := plan.loaded.config.policy.megatron_cfg.fp8_cfg).enabled:
        how = "emulated: quantised and dequantised" if plan.loaded.config.dppo.fp8_emulate else "Transformer Engine"
        yield f"  FP8: recipe {fp8.fp8_recipe}, {fp8.fp8} ({how})"


def _layout(plan: RunPlan) -> Iterator[str]:
    layout = plan.layout
    parallel = " and sequence-" if layout.sequence_parallel else "-"
    yield (
        f"layout         {layout.world_size} processes: {layout.tp} tensor{parallel}parallel x {layout.cp} context- "
        f"x {layout.dp} data- x {layout.pp} pipeline-parallel"
        + (f" of {layout.virtual_pp} interleaved chunks" if layout.virtual_pp > 1 else "")
    )
    for rank in plan.ranks[:_MAX_RANKS]:
        yield f"  rank {rank.rank}: node {rank.node}, tp {rank.tp}, cp {rank.cp}, dp {rank.dp}, pp {rank.pp}"
    if len(plan.ranks) > _MAX_RANKS:
        yield f"  and {len(plan.ranks) - _MAX_RANKS} more (--json lists them)"


def _batch(plan: RunPlan) -> Iterator[str]:
    batch = plan.arithmetic
    policy = "on-policy" if batch.on_policy else "off-policy after the first"
    plural = "" if batch.num_minibatches == 1 else "s"
    yield (
        f"batch          {batch.num_prompts} prompts x {batch.num_generations} completions = {batch.num_sequences}; "
        f"{batch.num_minibatches} optimizer step{plural} a rollout batch: {policy}"
    )


def _padding(plan: RunPlan) -> Iterator[str]:
    layout, policy = plan.layout, plan.loaded.config.policy
    yield f"padding        sequences to {plan.padding.sequence} tokens, rows to {plan.padding.row}"
    if layout.cp > 1:
        yield f"  context parallelism cuts each sequence into 2 x {layout.cp}"
    if layout.sequence_parallel:
        yield f"  sequence parallelism cuts a rank's tokens by {layout.tp}"
    if (multiple := rows_multiple(layout)) > 1:
        yield f"  interleaved stages take rows in groups of {multiple}; what is missing is filled with empty rows"
    if policy.make_sequence_length_divisible_by != plan.padding.sequence:
        yield (
            f"  policy.make_sequence_length_divisible_by = {policy.make_sequence_length_divisible_by} was raised to "
            "what the layout needs"
        )


def _savings(plan: RunPlan) -> Iterator[str]:
    savings = plan.savings
    if savings.trained == 1:
        yield "pruning        none by chance"
    else:
        yield (
            f"pruning        {savings.rollouts:.0%} of completions sampled, {savings.trained:.0%} trained on, once "
            f"every prompt has a history (threshold: at least); variance factor {savings.variance_factor:.2f} if "
            "pruned uniformly, less by score"
        )
    if plan.loaded.config.dppo.drop_zero_advantage and not plan.loaded.config.loss_fn.reference_policy_kl_penalty:
        yield "  completions without advantage are dropped beyond that, exactly"


def _memory(plan: RunPlan) -> Iterator[str]:
    if not plan.memory:
        yield "memory         not estimated: the model's sizes are not known here"
        return
    unit, name = (_GIB, "GiB") if max(stage.peak for stage in plan.memory) >= _GIB else (_MIB, "MiB")
    yield f"memory         {name} on a GPU, estimated (docs/sizing.md)"
    first = plan.memory[0]
    absent = {"engine_sleeps"} | ({"kv_cache"} if first.engine_sleeps else set())
    absent |= set() if first.set_aside else {"set_aside"}
    names = [name for name in asdict(first) if name not in absent]
    yield "  " + "stage  " + "  ".join(names) + "  peak"
    for number, stage in enumerate(plan.memory):
        cells = [f"{getattr(stage, name) / unit:{len(name)}.1f}" for name in names]
        yield f"  {number:5d}  " + "  ".join(cells) + f"  {stage.peak / unit:4.1f}"
    if first.engine_sleeps:
        share = plan.loaded.config.policy.generation.vllm_cfg.gpu_memory_utilization
        yield "  rollout_weights: vLLM's, which sleeps during the update; while it samples it takes, with its cache,"
        yield f"  {share:.0%} of a GPU (gpu_memory_utilization), beside weights and what is not set aside"
    if first.set_aside:
        yield "  set_aside: gradients and optimizer state, on the host while vLLM samples"


def _launch(plan: RunPlan) -> Iterator[str]:
    yield "launch"
    yield from (f"  {command}" for command in plan.launch)
