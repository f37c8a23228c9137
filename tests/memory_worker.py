"""One rank that builds small policies, takes an update, and writes what each really holds, bytes.

argv: model directory, output file, then names of cases. Saved activations are counted where autograd saves them,
storages once, at their peak.
"""

import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import PackedRow
from dppo_megatron.config.schema import (
    DistributedDataParallelConfig,
    LossConfig,
    MegatronConfig,
    OptimizerConfig,
    PolicyConfig,
)
from dppo_megatron.config.schema import SchedulerConfig as Scheduler
from dppo_megatron.parallel.mesh import lay_out
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.plan import Layout
from dppo_megatron.rl.loss import PolicyLoss

ROW_TOKENS, CHUNK = 512, 64


def policy_of(model: str, *, precision: str = "float32", **megatron: object) -> PolicyConfig:
    """A policy's section with the defaults replaced that would need other keys to be resolved."""
    sharded = bool(megatron.pop("sharded", False))
    return PolicyConfig(
        model_name=model,
        precision=precision,  # pyright: ignore[reportArgumentType]
        logprob_chunk_size=CHUNK,
        megatron_cfg=replace(
            MegatronConfig(
                pipeline_dtype=precision,
                optimizer=OptimizerConfig(clip_grad=1.0, use_distributed_optimizer=sharded),
                scheduler=Scheduler(start_weight_decay=0.0, end_weight_decay=0.0),
                distributed_data_parallel_config=DistributedDataParallelConfig(overlap_grad_reduce=False),
            ),
            **megatron,  # pyright: ignore[reportArgumentType]
        ),
    )


CASES: dict[str, dict[str, object]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16_sharded": {"precision": "bfloat16", "sharded": True},
    "full_recompute": {"activation_checkpointing": True},
    "selective_recompute": {"activation_checkpointing": True, "recompute_granularity": "selective"},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_virtual2": {"pipeline_model_parallel_size": 2},
}
VIRTUAL_PP = {"pp2_virtual2": 2}
"""Chunks of a pipeline stage, where they are several."""


class SavedBytes:
    """Counts the storages that autograd keeps for the backward pass, and their peak."""

    def __init__(self, *, without: Iterable[Tensor]) -> None:
        self._without = {tensor.untyped_storage().data_ptr() for tensor in without}
        self._holders: Counter[int] = Counter()
        self._live = 0
        self.peak = 0

    def pack(self, tensor: Tensor) -> list[Tensor]:
        """Count a tensor that is saved; what is returned lives as long as it is kept."""
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        held = _Held([tensor])
        if key not in self._without:
            self._live += size if not self._holders[key] else 0
            self._holders[key] += 1
            self.peak = max(self.peak, self._live)
            weakref.finalize(held, self._release, key, size)
        return held

    def _release(self, key: int, size: int) -> None:
        self._holders[key] -= 1
        self._live -= size if not self._holders[key] else 0


class _Held(list[Tensor]):
    """A list that can be watched."""


def make_rows(count: int) -> list[PackedRow]:
    """Rows of one whole sequence each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (ROW_TOKENS + 1,), generator=generator)
    ones = torch.ones(ROW_TOKENS)
    row = PackedRow(
        token_ids=ids[:-1],
        labels=ids[1:],
        positions=torch.arange(ROW_TOKENS),
        coefficients=ones,
        advantages=ones,
        sampled_logprobs=-ones,
        cu_seqlens=torch.tensor([0, ROW_TOKENS], dtype=torch.int32),
        sequence_lengths=np.array([ROW_TOKENS]),
        num_sequences=1,
    )
    return [row] * count


def gradient_buffers(policy: Policy) -> list[Any]:
    """megatron-core's flat buffers, whose attribute hides that of torch's modules."""
    chunks: list[Any] = list(policy.chunks)
    return [buffer for chunk in chunks for buffer in chunk.buffers]


def optimizer_bytes(policy: Policy) -> int:
    """Main parameters and moments, storages once, without the model's own."""
    own = {parameter.data.untyped_storage().data_ptr() for parameter in policy.own_parameters()}
    sharded = (buffer.param_data for buffer in gradient_buffers(policy) if buffer.param_data is not None)
    own |= {data.untyped_storage().data_ptr() for data in sharded}
    found: dict[int, int] = {}
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        inner = part.optimizer
        tensors = [tensor for group in inner.param_groups for tensor in group["params"]]
        tensors += [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        for tensor in tensors:
            storage = tensor.data.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def measure(name: str, model: str) -> dict[str, int]:
    """Bytes of one case on this rank."""
    config = policy_of(model, **CASES[name])  # pyright: ignore[reportArgumentType]
    megatron, world = config.megatron_cfg, torch.distributed.get_world_size()
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=1,
        dp=world // (tp * pp),
        sequence_parallel=megatron.sequence_parallel,
        virtual_pp=VIRTUAL_PP.get(name, 1),
    )
    mesh = lay_out(layout, seed=1)
    architecture = read_architecture(AutoConfig.from_pretrained(model).to_dict())
    policy = Policy(config, architecture, source=Path(model), mesh=mesh)
    loss = PolicyLoss(LossConfig(reference_policy_kl_penalty=0.0))
    saved = SavedBytes(without=policy.own_parameters())
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held[0]):
        policy.update(make_rows(4), loss=loss, denominator=1.0, temperature=1.0)
    return {
        "weights": sum(parameter.numel() * parameter.element_size() for parameter in policy.own_parameters()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in gradient_buffers(policy)),
        "optimizer": optimizer_bytes(policy),
        "activations": saved.peak,
    }


def main() -> None:
    """Measure every case, and write the figures of every rank."""
    model, output, *names = sys.argv[1:]
    device.set_num_threads()
    device.start_process_group()
    for name in names:
        measured = measure(name, model)
        rank = torch.distributed.get_rank()
        Path(f"{output}.{name}.{rank}").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
