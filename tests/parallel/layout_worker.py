"""One rank of a launch that takes the toy step on several layouts in turn and writes what came out.

argv: model directory, output directory, then the names of layouts.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from toy_step import NUM_GENERATIONS, TEMPERATURE, ToyStep, make_step, megatron_config, policy_config, share_of
from transformers import AutoConfig

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import PackedRow, RowPlan, ScoredBatch
from dppo_megatron.config.schema import LossConfig, MegatronConfig
from dppo_megatron.parallel.exchange import exchange, gather_scores
from dppo_megatron.parallel.hf_weights import stream_weights
from dppo_megatron.parallel.mesh import Mesh, lay_out
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.plan import Layout, padding_multiples
from dppo_megatron.rl.loss import PolicyLoss

LAYOUTS: dict[str, MegatronConfig] = {
    "one": megatron_config(),
    "tp2": megatron_config(tp=2),
    "tp2_sp": megatron_config(tp=2, sp=True),
    "pp2": megatron_config(pp=2),
    "cp2": megatron_config(cp=2),
    "dp2": megatron_config(),
    "dp2_sharded": megatron_config(sharded=True),
    "dp2_sharded_overlap": megatron_config(sharded=True, overlap=True),
}
NUM_STEPS, KL = 2, 0.05


def layout_of(megatron: MegatronConfig, world_size: int) -> Layout:
    """The layout with as many data-parallel replicas as fit."""
    tp, pp, cp = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )
    return Layout(tp=tp, pp=pp, cp=cp, dp=world_size // (tp * pp * cp), sequence_parallel=megatron.sequence_parallel)


def deal_rows(num_sequences: int, layout: Layout) -> RowPlan:
    """Three rows a data-parallel rank, sequences dealt in turn; the last rank's last row stays empty."""
    multiples = padding_multiples(layout)
    num_rows = 3 * layout.dp
    bins = [np.arange(start, num_sequences, num_rows - 1) for start in range(num_rows - 1)]
    bins.append(np.zeros(0, np.int64))
    rows = tuple(tuple(bins[3 * rank : 3 * rank + 3]) for rank in range(layout.dp))
    return RowPlan(rows=rows, sequence_multiple=multiples.sequence, row_multiple=multiples.row)


def run_layout(name: str, model: Path, output: Path) -> None:
    """Take two steps and write what came out from rank 0, tensors under their Hugging Face names."""
    megatron = LAYOUTS[name]
    layout = layout_of(megatron, torch.distributed.get_world_size())
    mesh = lay_out(layout, seed=1)
    architecture = read_architecture(AutoConfig.from_pretrained(model).to_dict())
    policy = Policy(policy_config(model, megatron), architecture, source=model, mesh=mesh)
    results = take_steps(policy, mesh, layout)
    results |= {f"weights.{key}": tensor.clone() for key, tensor in policy.hf_weights()}
    if mesh.world.is_first:
        save_file(results, output / f"{name}.safetensors")


def take_steps(policy: Policy, mesh: Mesh, layout: Layout) -> dict[str, Tensor]:
    """Two updates on the same batch, with the KL penalty against the first weights."""
    step = make_step()
    scores = gathered_scores(step, mesh)
    assert np.array_equal(scores.advantages, step.scores.advantages)
    assert np.array_equal(scores.completion_lengths, step.scores.completion_lengths)
    rows = exchange(
        share_of(step, rank=mesh.world.rank, size=mesh.world.size),
        step.plan,
        deal_rows(len(step.plan), layout),
        scores=scores,
        token_level_loss=False,
        mesh=mesh,
    )
    loss = PolicyLoss(LossConfig(reference_policy_kl_penalty=KL))
    results = {"logprob_sum": total_logprob(policy, rows, mesh)}
    reference = policy.reference()
    for number in range(NUM_STEPS):
        rows = policy.attach_logprobs(rows, old=False, reference=reference, temperature=TEMPERATURE)
        stats = policy.update(rows, loss=loss, denominator=step.plan.denominator, temperature=TEMPERATURE)
        results["tokens"] = torch.tensor(stats.num_tokens)
        results[f"loss.{number}"] = torch.tensor(stats.loss, dtype=torch.float64)
        results[f"grad_norm.{number}"] = torch.tensor(stats.grad_norm, dtype=torch.float64)
    if not policy.config.megatron_cfg.optimizer.use_distributed_optimizer:
        results |= {f"gradients.{key}": tensor.clone() for key, tensor in streamed_gradients(policy)}
    return results


def gathered_scores(step: ToyStep, mesh: Mesh) -> ScoredBatch:
    """The step's scores, each rank contributing those of its own prompts."""
    prompts = np.arange(mesh.world.rank, len(step.rollouts.prompts), mesh.world.size)
    mine = (prompts[:, None] * NUM_GENERATIONS + np.arange(NUM_GENERATIONS)).ravel()
    return gather_scores(
        share_of(step, rank=mesh.world.rank, size=mesh.world.size),
        step.scores.rewards[mine],
        step.scores.advantages[mine],
        kept=step.scores.prompts,
        num_generations=NUM_GENERATIONS,
        over=mesh.world,
    )


def total_logprob(policy: Policy, rows: Sequence[PackedRow], mesh: Mesh) -> Tensor:
    """Sum of the sampled tokens' log-probs over all ranks."""
    parts = policy.logprobs(rows, temperature=TEMPERATURE)
    trained = [row.coefficients != 0 for row in rows]
    total = torch.zeros((), dtype=torch.float64)
    for values, mask in zip(parts, trained, strict=False):
        total += (values * mask).sum()
    torch.distributed.all_reduce(total, group=mesh.dp_cp.group)
    torch.distributed.broadcast(total, src=mesh.pp.ranks[-1], group=mesh.pp.group)
    return total


def streamed_gradients(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The (clipped) gradients, through the stream that the weights take."""
    # The tied copy on a last stage carries the same, summed, gradient: it is not in the table.
    by_storage: dict[int, Any] = {parameter.data_ptr(): parameter for parameter in policy.model.module.parameters()}
    located = policy.parameters
    gradients = {name: by_storage[shard.data_ptr()].main_grad for name, shard in located.local.items()}
    return stream_weights(replace(located, local=gradients), mesh=policy.mesh, bucket_bytes=2**20)


def main() -> None:
    """Run the layouts named on the command line."""
    model, output = Path(sys.argv[1]), Path(sys.argv[2])
    device.set_num_threads()
    device.start_process_group()
    for name in sys.argv[3:]:
        run_layout(name, model, output)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
