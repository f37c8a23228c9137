"""One rank of a launch that takes one update of the toy step under many packings and writes the gradients.

argv: model directory, output directory, context-parallel size, then JSON of packings by name.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from dppo_megatron.batches import RowPlan
from dppo_megatron.config.schema import LossConfig, SequencePackingConfig
from dppo_megatron.parallel.exchange import exchange
from dppo_megatron.parallel.mesh import Mesh, lay_out
from dppo_megatron.parallel.policy import Policy, Reference
from dppo_megatron.parallel.regrouping import lengths_in, regroup
from dppo_megatron.plan import Layout, padding_multiples
from dppo_megatron.rl.loss import PolicyLoss
from dppo_megatron.rl.packing import plan_rows


def plan_of(lengths: np.ndarray, packing: dict[str, Any], mesh: Mesh, *, capacity: int, dp_size: int) -> RowPlan:
    """A plan, its rows and their sequences shuffled where the packing says so."""
    multiples = padding_multiples(mesh.layout)
    plan = plan_rows(
        lengths,
        config=SequencePackingConfig(algorithm=packing["algorithm"]),
        window=packing.get("window"),
        capacity=capacity,
        sequence_multiple=multiples.sequence,
        row_multiple=packing.get("row_multiple", multiples.row),
        dp_size=dp_size,
    )
    if not packing.get("shuffle"):
        return plan
    random = np.random.default_rng(0)  # the same on every rank
    rows = [[random.permutation(row) for row in rank] for rank in plan.rows]
    return replace(plan, rows=tuple(tuple(rank[index] for index in random.permutation(len(rank))) for rank in rows))


def gradients(policy: Policy, mesh: Mesh, reference: Reference, packing: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients of one update without a step (the rate is 0), the log-probs passes in rows of their own."""
    step = make_step()
    rollouts, scores = share_of(step, rank=mesh.world.rank, size=mesh.world.size), gathered_scores(step, mesh)
    plan = plan_of(step.plan.lengths, packing, mesh, capacity=packing["capacity"], dp_size=mesh.dp.size)
    rows = exchange(rollouts, step.plan, plan, scores=scores, token_level_loss=False, mesh=mesh)
    regrouping = None
    if capacity := packing.get("logprob_capacity"):
        other = plan_of(lengths_in(rows), packing, mesh, capacity=capacity, dp_size=1)
        regrouping = regroup(rows, other, cp_size=mesh.cp.size)
    rows = policy.attach_logprobs(rows, old=True, reference=reference, temperature=TEMPERATURE, regrouping=regrouping)
    loss = PolicyLoss(LossConfig(reference_policy_kl_penalty=0.5))
    stats = policy.update(rows, loss=loss, denominator=step.plan.denominator, temperature=TEMPERATURE)
    named: Any = policy.networks[0].named_parameters()
    found = {name: parameter.main_grad.clone() for name, parameter in named}
    return found | {"loss": torch.tensor(stats.loss), "tokens": torch.tensor(stats.num_tokens)}


def main() -> None:
    """Run every packing on one layout."""
    model, output, cp = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    device.set_num_threads()
    device.start_process_group()
    world_size = torch.distributed.get_world_size()
    mesh = lay_out(Layout(tp=1, pp=1, cp=cp, dp=world_size // cp, sequence_parallel=False), seed=1)
    megatron = megatron_config(cp=cp)
    megatron = replace(megatron, optimizer=replace(megatron.optimizer, lr=0.0))
    architecture = read_architecture(AutoConfig.from_pretrained(model).to_dict())
    policy = Policy(policy_config(model, megatron), architecture, source=model, mesh=mesh)
    # Another model than the policy, so that the penalty has a gradient.
    reference = Reference(tuple(0.7 * shard for shard in policy.reference().shards))
    for name, packing in json.loads(sys.argv[4]).items():
        found = gradients(policy, mesh, reference, packing)
        if mesh.world.is_first:
            save_file(found, output / f"{name}.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
