"""One rank of a launch that trains the toy step under rehearsed FP8 recipes and writes what came out.

argv: model directory, output directory, then JSON: name -> [layout, section fp8_cfg or null, number of updates].
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from toy_step import (
    TEMPERATURE,
    gathered_scores,
    make_step,
    megatron_config,
    policy_config,
    share_of,
)
from transformers import AutoConfig

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import PackedRow
from dppo_megatron.config.fp8 import Fp8Config
from dppo_megatron.config.schema import LossConfig, SequencePackingConfig
from dppo_megatron.parallel.exchange import exchange
from dppo_megatron.parallel.fp8_scaling import DelayedScaling
from dppo_megatron.parallel.mesh import Mesh, lay_out
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.plan import Layout, padding_multiples
from dppo_megatron.rl.loss import PolicyLoss
from dppo_megatron.rl.packing import plan_rows


def rows_of(mesh: Mesh) -> list[PackedRow]:
    """This rank's rows of the toy step, all of one rank in one row."""
    step = make_step()
    rollouts, scores = share_of(step, rank=mesh.world.rank, size=mesh.world.size), gathered_scores(step, mesh)
    multiples = padding_multiples(mesh.layout)
    plan = plan_rows(
        step.plan.lengths,
        config=SequencePackingConfig(),
        window=None,
        capacity=512,
        sequence_multiple=multiples.sequence,
        row_multiple=multiples.row,
        dp_size=mesh.dp.size,
    )
    return exchange(rollouts, step.plan, plan, scores=scores, token_level_loss=False, mesh=mesh)


def run(model: Path, axes: dict[str, Any], fp8: dict[str, Any] | None, *, num_updates: int) -> dict[str, Tensor]:
    """Log-probs before any update, then gradients, loss and delayed scales of the last one; the rate is 0."""
    megatron = megatron_config(**axes)
    megatron = replace(megatron, optimizer=replace(megatron.optimizer, lr=0.0))
    if fp8 is not None:
        megatron = replace(megatron, fp8_cfg=Fp8Config(enabled=True, **fp8))
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    dp = torch.distributed.get_world_size() // (tp * pp)
    mesh = lay_out(Layout(tp=tp, pp=pp, cp=1, dp=dp, sequence_parallel=megatron.sequence_parallel), seed=1)
    architecture = read_architecture(AutoConfig.from_pretrained(model).to_dict())
    config = policy_config(model, megatron)
    policy = Policy(config, architecture, source=model, mesh=mesh, rehearse_fp8=fp8 is not None)
    rows, found = rows_of(mesh), {}
    for row, logprobs in enumerate(policy.logprobs(rows, temperature=TEMPERATURE)):
        found |= {f"logprobs.{row}": logprobs, f"labels.{row}": rows[row].labels, f"ids.{row}": rows[row].token_ids}
        found[f"lengths.{row}"] = torch.from_numpy(rows[row].sequence_lengths)
    loss, stats = PolicyLoss(LossConfig(reference_policy_kl_penalty=0.0)), None
    for _ in range(num_updates):
        stats = policy.update(rows, loss=loss, denominator=24.0, temperature=TEMPERATURE)
    if stats is not None:
        found["loss"] = torch.tensor(stats.loss)
        for name, tensor in policy.gradients(
            rows,
            loss=PolicyLoss(LossConfig(reference_policy_kl_penalty=0.0)),
            denominator=24.0,
            temperature=TEMPERATURE,
        ):
            found[f"gradient.{name}"] = tensor.clone()
    found["scales"] = delayed_scales(policy)
    return found


def delayed_scales(policy: Policy) -> Tensor:
    """The scales of all quantizers of this rank, 0 where none is known yet."""
    scales = []
    for linear in (module for network in policy.networks for module in network.modules()):
        forward: Any = getattr(linear, "_forward_impl", None)
        if (keywords := getattr(forward, "keywords", None)) is None:
            continue
        made = keywords["rehearsal"].operands[keywords["index"]]
        for one in (made.inputs, made.weight, made.gradients):
            if isinstance(one, DelayedScaling):
                scales.append(0.0 if one._scale is None else float(one._scale))
    return torch.tensor(scales)


def main() -> None:
    """Run every case; each rank writes its own file."""
    model, output = Path(sys.argv[1]), Path(sys.argv[2])
    device.set_num_threads()
    device.start_process_group()
    for name, (axes, fp8, num_updates) in json.loads(sys.argv[3]).items():
        found = run(model, axes, fp8, num_updates=num_updates)
        rank = torch.distributed.get_rank()
        save_file({key: tensor.contiguous() for key, tensor in found.items()}, output / f"{name}.{rank}.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
