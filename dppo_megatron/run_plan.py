"""What ``dppo plan`` says of a run before it starts: problems, layout, batches, padding, savings, memory, launch."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dppo_megatron.architecture import Architecture, read_architecture
from dppo_megatron.config.loader import Examination, LoadedConfig, examine
from dppo_megatron.config.named_sets import DIRECTORY_VARIABLE, prepare_command, prepared_file
from dppo_megatron.config.problem import Problem
from dppo_megatron.config.schema import DppoConfig
from dppo_megatron.known_models import known_config
from dppo_megatron.memory import StageMemory, estimate_memory
from dppo_megatron.plan import (
    BatchArithmetic,
    Layout,
    PaddingMultiples,
    batch_arithmetic,
    check_layout,
    padding_multiples,
    resolve_layout,
    samples_with_vllm,
    sets_training_aside,
    token_alignment,
)

_MODEL = "policy.model_name"


def examine_run(path: str, overrides: Sequence[str]) -> Examination:
    """Examine a configuration, its model where the sizes can be had without the network, and files it needs."""
    found = examine(path, overrides)
    problems = list(_model_problems(found.loaded)) if found.loaded.config.policy.model_name else []
    problems += [(problem, False) for problem in _missing_files(found.loaded)]
    known = {problem.key for problem in found.errors}
    errors = tuple(problem for problem, is_error in problems if is_error and problem.key not in known)
    warnings = tuple(problem for problem, is_error in problems if not is_error)
    return replace(found, errors=found.errors + errors, warnings=found.warnings + warnings)


def _model_problems(loaded: LoadedConfig) -> Iterator[tuple[Problem, bool]]:
    """What is wrong with the model or its cutting, each with whether it is an error."""
    config = loaded.config
    name, megatron = config.policy.model_name, config.policy.megatron_cfg
    known = known_config(name)
    if known is None:
        reason = "its sizes are not known here, so layout and memory are not looked at"
        yield (
            Problem(_MODEL, name, loaded.place(_MODEL), reason, "give a local directory with its config.json"),
            False,
        )
        return
    try:
        architecture = read_architecture(known[0])
    except ValueError as error:
        reason = str(error).removeprefix(f"{_MODEL}: ")
        yield Problem(_MODEL, name, loaded.place(_MODEL), reason, "use a dense model of a supported family"), True
        return
    try:
        layout = resolve_layout(config.cluster, megatron=megatron, virtual_pp=config.dppo.virtual_pipeline_stages)
        check_layout(architecture, layout=layout, megatron=megatron)
    except ValueError as error:
        for line in str(error).splitlines():
            key, _, rest = line.partition(" = ")
            value, _, reason = rest.partition(": ")
            if key.startswith(("policy.megatron_cfg.", "dppo.")):
                yield Problem(key, int(value), loaded.place(key), reason, "change it, or the model"), True


def _missing_files(loaded: LoadedConfig) -> Iterator[Problem]:
    """What a recipe names without holding it, and is not on this machine: prepared sets, and prompts."""
    data = loaded.config.data
    for part, dataset in (("train", data.train), ("validation", data.validation)):
        if dataset is None:
            continue
        name, split, key = dataset.dataset_name, dataset.split, f"data.{part}.dataset_name"
        file = None if name is None else prepared_file(name, split)
        if name is not None and file is not None and not file.is_file():
            reason = f"it is read from {file}, which is not in {Path.cwd()}"
            command = prepare_command(name, split)
            yield Problem(key, name, loaded.place(key), reason, f"{command} (or set {DIRECTORY_VARIABLE})")
        for field in ("prompt_file", "system_prompt_file"):
            text, key = getattr(dataset, field), f"data.{part}.{field}"
            if text is not None and not Path(text).is_file():
                reason = f"there is no such file in {Path.cwd()}"
                yield Problem(
                    key, text, loaded.place(key), reason, "copy it from the recipe's repository, or use null"
                )


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a run: its machine and its place on each axis."""

    rank: int
    node: int
    tp: int
    cp: int
    dp: int
    pp: int


def ranks_of(layout: Layout, *, gpus_per_node: int) -> tuple[Rank, ...]:
    """Who is on which rank.

    Source: ``megatron.core.parallel_state.initialize_model_parallel``, order tp-cp-ep-dp-pp.
    """
    ranks = []
    for rank in range(layout.world_size):
        rest, tp = divmod(rank, layout.tp)
        rest, cp = divmod(rest, layout.cp)
        pp, dp = divmod(rest, layout.dp)
        ranks.append(Rank(rank, rank // gpus_per_node, tp=tp, cp=cp, dp=dp, pp=pp))
    return tuple(ranks)


@dataclass(frozen=True, slots=True)
class Savings:
    """What pruning is expected to do, once every prompt has a history; fractions.

    rollouts: completions that are sampled, of the candidates'. trained: completions that are trained on,
    likewise; ``threshold`` keeps more, since it prunes only what is below the mean. variance_factor: what pruning
    uniformly at these rates multiplies the second moment of the estimator by; policies by score stay below it.
    """

    rollouts: float
    trained: float
    variance_factor: float


def expected_savings(dppo: DppoConfig) -> Savings:
    """The fractions that the rates ask for; completions of zero advantage are dropped beyond them."""
    # greso goes by no rate: what it will skip cannot be told beforehand.
    prunes_prompts = dppo.enabled and dppo.prompt_pruning.enabled and dppo.prompt_pruning.policy != "greso"
    prompts = 1 - dppo.prompt_pruning.rate if prunes_prompts else 1.0
    completions = 1 - dppo.completion_pruning.rate if dppo.enabled and dppo.completion_pruning.enabled else 1.0
    trained = prompts * completions
    return Savings(rollouts=prompts, trained=trained, variance_factor=1 / trained)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The whole of it; what depends on the model's sizes is None where they are not known."""

    loaded: LoadedConfig
    warnings: tuple[Problem, ...]
    model_source: str
    architecture: Architecture | None
    layout: Layout
    ranks: tuple[Rank, ...]
    arithmetic: BatchArithmetic
    padding: PaddingMultiples
    savings: Savings
    memory: tuple[StageMemory, ...]
    launch: tuple[str, ...]


def make_plan(found: Examination, *, path: str, overrides: Sequence[str]) -> RunPlan:
    """The plan of a configuration without errors."""
    config = found.loaded.config
    policy = config.policy
    virtual_pp = config.dppo.virtual_pipeline_stages
    layout = resolve_layout(config.cluster, megatron=policy.megatron_cfg, virtual_pp=virtual_pp)
    known = known_config(policy.model_name)
    architecture = read_architecture(known[0]) if known else None
    memory: tuple[StageMemory, ...] = ()
    if architecture is not None:
        vllm = samples_with_vllm(config, on_gpu=True)
        cache = None if vllm else config.dppo.rollout.max_cache_tokens
        sets_aside = sets_training_aside(config)
        memory = estimate_memory(architecture, policy, layout=layout, max_cache_tokens=cache, sets_aside=sets_aside)
    return RunPlan(
        loaded=found.loaded,
        warnings=found.warnings,
        model_source=known[1] if known else "",
        architecture=architecture,
        layout=layout,
        ranks=ranks_of(layout, gpus_per_node=config.cluster.gpus_per_node),
        arithmetic=batch_arithmetic(config.grpo, train_global_batch_size=policy.train_global_batch_size),
        padding=padding_multiples(
            layout,
            sequence_divisor=policy.make_sequence_length_divisible_by,
            alignment=token_alignment(policy.megatron_cfg.fp8_cfg),
        ),
        savings=expected_savings(config.dppo),
        memory=memory,
        launch=launch_commands(
            path, overrides, gpus_per_node=config.cluster.gpus_per_node, num_nodes=config.cluster.num_nodes
        ),
    )


def launch_commands(path: str, overrides: Sequence[str], *, gpus_per_node: int, num_nodes: int) -> tuple[str, ...]:
    """The commands that start the run: on this machine (of one machine only), and as a Slurm job."""
    arguments = shlex.join(["train", path, *overrides])
    slurm = (
        f"sbatch --nodes={num_nodes} --ntasks-per-node={gpus_per_node} --gpus-per-node={gpus_per_node} --wrap "
        + shlex.quote(
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500; '
            f"srun dppo {arguments}"
        )
    )
    return (f"dppo {arguments}", slurm) if num_nodes == 1 else (slurm,)
