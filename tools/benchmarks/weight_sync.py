"""Measure the way of weights from a sharded policy into vLLM, by bucket size, on a model of random weights.

torchrun --standalone --nproc-per-node=2 -m tools.benchmarks.weight_sync MODEL_DIR [--layers 30] [--repeats 3]

MODEL_DIR is made where it does not exist (135 million parameters with 30 layers). The trainer's layout is TP over
all processes; engines have one rank, or one engine has all. Without vLLM the last column stays empty.
"""

import argparse
import collections
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.config.generation_schema import GenerationConfig, VllmConfig
from dppo_megatron.config.schema import (
    DistributedDataParallelConfig,
    MegatronConfig,
    OptimizerConfig,
    PolicyConfig,
    SchedulerConfig,
)
from dppo_megatron.parallel.mesh import Mesh, open_mesh
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.plan import Layout
from dppo_megatron.rl.vllm_engine import VllmEngine

MEBIBYTE = 2**20
BUCKETS = (0, 1, 16, 64, 256, 1024)  # MiB a rank; 0: one parameter each


def make_model(directory: Path, *, num_layers: int) -> None:
    """Write the model; by one process, before the others read it."""
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(directory)


def make_policy(directory: Path, mesh: Mesh) -> Policy:
    """The model over the mesh's tensor-parallel ranks, in float32."""
    megatron = MegatronConfig(
        tensor_model_parallel_size=mesh.layout.tp,
        pipeline_dtype="float32",
        optimizer=OptimizerConfig(use_distributed_optimizer=False, clip_grad=1.0),
        scheduler=SchedulerConfig(start_weight_decay=0.01, end_weight_decay=0.01),
        distributed_data_parallel_config=DistributedDataParallelConfig(overlap_grad_reduce=False),
    )
    config = PolicyConfig(model_name=str(directory), precision="float32", megatron_cfg=megatron)
    architecture = read_architecture(AutoConfig.from_pretrained(directory).to_dict())
    return Policy(config, architecture, source=directory, mesh=mesh)


def seconds(work: Callable[[], object], *, repeats: int) -> float:
    """Median wall seconds, the processes starting together."""
    taken = []
    for _ in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def memory_copy_seconds(num_bytes: int, *, repeats: int) -> float:
    """A copy of as many bytes from one tensor to another, by every process at once."""
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    return seconds(lambda: target.copy_(source), repeats=repeats)


def gather_state_dict(policy: Policy) -> None:
    """What one would write without a stream: every parameter gathered on its own, all of them kept."""
    state = {}
    for name, shard in policy.parameters.local.items():
        whole = shard.new_empty(policy.mesh.tp.size * shard.numel())
        dist.all_gather_into_tensor(whole, shard.flatten(), group=policy.mesh.tp.group)
        state[name] = whole.clone()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    device.start_process_group()
    if dist.get_rank() == 0 and not arguments.model.exists():
        make_model(arguments.model, num_layers=arguments.layers)
    dist.barrier()
    layout = Layout(tp=dist.get_world_size(), pp=1, cp=1, dp=1, sequence_parallel=False)
    with open_mesh(layout, seed=0) as mesh:
        measure(make_policy(arguments.model, mesh), repeats=arguments.repeats)
    dist.destroy_process_group()


def gather_alone(num_bytes: int, *, bucket_bytes: int, repeats: int) -> float:
    """The collectives of a stream and nothing else: the same bytes in the same buckets, between two tensors."""
    size = dist.get_world_size()
    source = torch.ones(min(bucket_bytes, num_bytes // size) // 4)
    target = torch.empty(size * source.numel())
    count = -(-num_bytes // (target.numel() * 4))

    def gather() -> None:
        for _ in range(count):
            dist.all_gather_into_tensor(target, source)

    return seconds(gather, repeats=repeats)


def read_stream(policy: Policy, engine_tp: int) -> None:
    """The stream without a reader."""
    collections.deque(policy.hf_weights(engine_tp=engine_tp), maxlen=0)


def load(engine: VllmEngine, policy: Policy) -> None:
    """The stream with its reader."""
    engine.reload(policy.hf_weights())


def measure(policy: Policy, *, repeats: int) -> None:
    """Print the table on the first rank."""
    first, size = policy.mesh.world.is_first, policy.mesh.world.size
    num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in policy.hf_weights())
    copy_seconds = memory_copy_seconds(num_bytes, repeats=repeats)
    plain = seconds(lambda: gather_state_dict(policy), repeats=repeats)
    engine = start_engine(policy)
    if first:
        print(f"{num_bytes / MEBIBYTE:.0f} MiB sent with lm_head, TP {size}: each rank receives 1 - 1/{size} of it")
        print(f"a copy in memory {copy_seconds:.3f} s; a plain state_dict gather {plain:.3f} s")
        print("            gather alone   to engines of TP 1    to one engine        TP 1 into vLLM")
        print("bucket MiB        s  / copy       s  / copy           s  / copy            s  / copy")
    for bucket in BUCKETS:
        policy.config = replace(policy.config, refit_buffer_size_gb=bucket / 1024)
        taken = [gather_alone(num_bytes, bucket_bytes=bucket * MEBIBYTE, repeats=repeats)] if bucket else [math.nan]
        taken += [seconds(partial(read_stream, policy, engine_tp), repeats=repeats) for engine_tp in (1, size)]
        if engine is not None:
            taken.append(seconds(partial(load, engine, policy), repeats=repeats))
        if first:
            cells = "   ".join(f"{value:8.3f} {value / copy_seconds:7.1f}" for value in taken)
            print(f"{bucket:10} {cells}", flush=True)
    if engine is not None:
        engine.close(healthy=True)


def start_engine(policy: Policy) -> VllmEngine | None:
    """An engine a process, where vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    vllm_cfg = VllmConfig(precision="float32", max_model_len=128)
    return VllmEngine(
        policy.source,
        architecture=policy.architecture,
        generation=GenerationConfig(max_new_tokens=8, vllm_cfg=vllm_cfg),
        max_cache_tokens=1024,
    )


if __name__ == "__main__":
    main()
