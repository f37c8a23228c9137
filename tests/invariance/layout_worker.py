"""One rank of a launch that takes the toy step in several configurations in turn and writes what came out.

argv: directory of models, output directory, then names of cases.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adam_state import KINDS, streamed_state
from breakages import broken
from matrix import BUCKET_BYTES, CONTROLS, PARITY, STREAM_MEASURED, Case, Deal
from safetensors.torch import load_file, save_file
from suite import step_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from toy_step import TEMPERATURE, ToyStep, gathered_scores, policy_config, share_of
from transformers import AutoConfig

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import PackedRow, RowPlan
from dppo_megatron.config.schema import LossConfig, MegatronConfig, SequencePackingConfig
from dppo_megatron.parallel import collectives, hf_weights
from dppo_megatron.parallel.exchange import exchange
from dppo_megatron.parallel.mesh import Mesh, lay_out
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.parallel.resharding import engine_slabs
from dppo_megatron.parallel.sequence_layout import zigzag_positions
from dppo_megatron.parallel.weight_source import open_source
from dppo_megatron.plan import Layout, padding_multiples, rows_multiple
from dppo_megatron.rl.loss import PolicyLoss
from dppo_megatron.rl.packing import plan_rows

NUM_STEPS, KL = 2, 0.05


def layout_of(megatron: MegatronConfig, world_size: int, *, virtual_pp: int = 1) -> Layout:
    """The layout with as many data-parallel replicas as fit."""
    tp, pp, cp = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.context_parallel_size,
    )
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=world_size // (tp * pp * cp),
        sequence_parallel=megatron.sequence_parallel,
        virtual_pp=virtual_pp,
    )


def deal_evenly(num_sequences: int, layout: Layout) -> RowPlan:
    """Three rows or more a data-parallel rank, sequences dealt in turn; the last rank's last row stays empty."""
    each = -(-3 // rows_multiple(layout)) * rows_multiple(layout)
    num_rows = each * layout.dp
    bins = [np.arange(start, num_sequences, num_rows - 1) for start in range(num_rows - 1)]
    bins.append(np.zeros(0, np.int64))
    return _plan(tuple(tuple(bins[each * rank : each * (rank + 1)]) for rank in range(layout.dp)), layout)


def _plan(rows: tuple[tuple[np.ndarray, ...], ...], layout: Layout) -> RowPlan:
    multiples = padding_multiples(layout)
    return RowPlan(
        rows=rows, sequence_multiple=multiples.sequence, row_multiple=multiples.row, num_packed=sum(map(len, rows))
    )


def deal_rows(step: ToyStep, layout: Layout, deal: Deal) -> RowPlan:
    """The kept sequences in rows, as a case says."""
    multiples, num_sequences = padding_multiples(layout), len(step.plan)
    if deal == "evenly":
        return deal_evenly(num_sequences, layout)
    if deal == "full_row":
        return plan_rows(
            step.plan.lengths,
            config=SequencePackingConfig(),
            window=None,
            capacity=-(-int(step.plan.lengths.max()) // multiples.row) * multiples.row,
            sequence_multiple=multiples.sequence,
            row_multiple=multiples.row,
            dp_size=layout.dp,
        )
    nothing, last = np.zeros(0, np.int64), np.zeros(0, np.int64)
    if deal == "single_token":
        last = np.flatnonzero(step.plan.completion_lengths == 1)[:1]
        assert len(last) == 1
    rest = np.setdiff1d(np.arange(num_sequences), last)
    return _plan(((rest[::2], rest[1::2]), (nothing, last)), layout)


def run_case(case: Case, models: Path, output: Path) -> None:
    """Take two steps and write what came out from rank 0, tensors under their Hugging Face names."""
    source = models / case.model
    layout = layout_of(case.megatron, torch.distributed.get_world_size(), virtual_pp=case.virtual_pp)
    mesh = lay_out(layout, seed=1)
    architecture = read_architecture(AutoConfig.from_pretrained(source).to_dict())
    with broken(case.breakage):
        policy = Policy(policy_config(source, case.megatron), architecture, source=source, mesh=mesh)
        loaded = {key: tensor.clone() for key, tensor in policy.hf_weights()}
        results = take_steps(policy, mesh, layout, step_of(case.setting), case.deal)
    results["stream.as_loaded"] = torch.tensor(equals_source(loaded, source))
    weights = {key: tensor.clone().contiguous() for key, tensor in policy.hf_weights()}
    results["stream.as_held"] = everywhere(equals_shards(weights, policy, output / f"{case.name}-{mesh.world.rank}"))
    results["stream.parts"] = everywhere(has_engine_parts(weights, policy))
    held = {row.layer for row in policy.parameters.table if row.name in policy.parameters.local}
    results["layers_of_first_rank"] = torch.tensor(sorted(layer for layer in held if layer is not None))
    results["disagreement_ends_the_run"] = everywhere(refuses_disagreement(mesh))
    if case.name in STREAM_MEASURED:
        results["stream.peak"] = stream_peak(policy, bucket_bytes=BUCKET_BYTES)
        results["stream.peak_of_one_bucket"] = stream_peak(policy, bucket_bytes=2**30)
    results |= {f"weights.{key}": tensor for key, tensor in weights.items()}
    for kind in KINDS:
        results |= {f"{kind}.{key}": tensor.clone() for key, tensor in streamed_state(policy, kind)}
    if mesh.world.is_first:
        save_file(results, output / f"{case.name}.safetensors")


def equals_source(streamed: dict[str, Tensor], source: Path) -> bool:
    """Whether the stream of a policy that was just loaded is the file's content, bit for bit."""
    files = load_file(source / "model.safetensors")
    return all(torch.equal(streamed[name], tensor.to(streamed[name].dtype)) for name, tensor in files.items())


def equals_shards(streamed: dict[str, Tensor], policy: Policy, scratch: Path) -> bool:
    """Whether the streamed tensors, cut up by the loader, are the shards that this rank holds, bit for bit."""
    scratch.mkdir()
    save_file(streamed, scratch / "model.safetensors")
    cut = {name: torch.full_like(shard, torch.nan) for name, shard in policy.parameters.local.items()}
    located = replace(policy.parameters, local=cut)
    hf_weights.load_weights(located, open_source(scratch, policy.architecture), mesh=policy.mesh)
    return all(torch.equal(cut[name], shard) for name, shard in policy.parameters.local.items())


def has_engine_parts(weights: dict[str, Tensor], policy: Policy) -> bool:
    """Whether engines of every size that fits get what they would cut out of the whole tensors, bit for bit."""
    world, architecture = policy.mesh.world, policy.architecture
    for engine_tp in (size for size in (2, 4) if world.size % size == 0):
        streamed = {name: tensor.clone() for name, tensor in policy.hf_weights(engine_tp=engine_tp)}
        slabs = {slab.hf_name: slab for slab in engine_slabs(architecture, tp=engine_tp, rank=world.rank % engine_tp)}
        slabs.setdefault("lm_head.weight", slabs["model.embed_tokens.weight"])
        if list(streamed) != list(weights):
            return False
        for name, slab in slabs.items():
            mine, whole = (
                tensors[name].narrow(slab.dim, slab.start, slab.stop - slab.start) for tensors in (streamed, weights)
            )
            if streamed[name].shape != weights[name].shape or not torch.equal(mine, whole):
                return False
    return True


def stream_peak(policy: Policy, *, bucket_bytes: int) -> Tensor:
    """Most bytes that streaming must hold at once, by the allocator's own account; a reader keeps nothing.

    The least of several streams: gloo's threads let go of a message some time after it has arrived.
    """
    return torch.tensor(min(_held_at_most(policy, bucket_bytes=bucket_bytes) for _ in range(8)))


def _held_at_most(policy: Policy, *, bucket_bytes: int) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in hf_weights.stream_weights(policy.parameters, mesh=policy.mesh, bucket_bytes=bucket_bytes):
            pass
    kineto: Any = profiler.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(np.cumsum(sizes).tolist(), default=0)


def refuses_disagreement(mesh: Mesh) -> bool:
    """Whether this rank is stopped where one of several has decided otherwise than the others."""
    collectives.require_equal(7, mesh.world, what="keep decisions")
    try:
        collectives.require_equal(7 + (mesh.world.is_last and mesh.world.size > 1), mesh.world, what="keep decisions")
    except RuntimeError as error:
        return "keep decisions differ" in str(error)
    return mesh.world.size == 1


def everywhere(holds: bool) -> Tensor:
    """Whether it holds on every rank."""
    count = torch.tensor(int(holds))
    torch.distributed.all_reduce(count)
    return count == torch.distributed.get_world_size()


def take_steps(policy: Policy, mesh: Mesh, layout: Layout, step: ToyStep, deal: Deal) -> dict[str, Tensor]:
    """Two updates on the same batch, with the KL penalty against the first weights."""
    scores = gathered_scores(step, mesh)
    assert np.array_equal(scores.advantages, step.scores.advantages)
    assert np.array_equal(scores.completion_lengths, step.scores.completion_lengths)
    assert np.array_equal(scores.surprises, step.scores.surprises)
    plan = deal_rows(step, layout, deal)
    rows = exchange(
        share_of(step, rank=mesh.world.rank, size=mesh.world.size),
        step.plan,
        plan,
        scores=scores,
        token_level_loss=False,
        mesh=mesh,
    )
    loss = PolicyLoss(LossConfig(reference_policy_kl_penalty=KL))
    results = {}
    reference = policy.reference()
    for number in range(NUM_STEPS):
        results[f"logprobs.{number}"] = token_logprobs(policy, rows, plan, step, mesh)
        rows = policy.attach_logprobs(rows, old=False, reference=reference, temperature=TEMPERATURE)
        # Between the steps, and skipped: everything that is compared is as if it had not been.
        poisoned = poison(rows, mesh)
        skipped = policy.update(poisoned, loss=loss, denominator=step.plan.denominator, temperature=TEMPERATURE)
        assert skipped.skipped, f"rank {mesh.world.rank} did not skip the update"
        stats = policy.update(rows, loss=loss, denominator=step.plan.denominator, temperature=TEMPERATURE)
        assert not stats.skipped
        results["tokens"] = torch.tensor(stats.num_tokens)
        results[f"loss.{number}"] = torch.tensor(stats.loss, dtype=torch.float64)
        results[f"grad_norm.{number}"] = torch.tensor(stats.grad_norm, dtype=torch.float64)
    return results


def poison(rows: Sequence[PackedRow], mesh: Mesh) -> list[PackedRow]:
    """The same rows, but one of the last data-parallel rank has infinite advantages."""
    if mesh.dp.is_last:
        return [replace(rows[0], advantages=rows[0].advantages * float("inf")), *rows[1:]]
    return list(rows)


def token_logprobs(policy: Policy, rows: Sequence[PackedRow], plan: RowPlan, step: ToyStep, mesh: Mesh) -> Tensor:
    """Log-probs [K, longest completion] of every kept sequence's sampled tokens, zero behind their ends."""
    lengths = step.plan.completion_lengths
    total = torch.zeros(len(lengths), int(lengths.max()))
    found = policy.logprobs(rows, temperature=TEMPERATURE)
    for row, values, sequences in zip(rows, found, plan.rows[mesh.dp.rank], strict=False):
        places = torch.arange(len(values))
        if mesh.cp.size > 1:
            held = zigzag_positions(np.diff(row.cu_seqlens.numpy()).astype(np.int64), mesh.cp.size)
            places = torch.from_numpy(held[mesh.cp.rank])
        trained = row.coefficients != 0
        number = torch.searchsorted(row.cu_seqlens.long(), places[trained], right=True) - 1
        index = torch.from_numpy(sequences)[number]
        prompts = torch.from_numpy(step.plan.lengths - lengths)[index]
        total[index, row.positions[trained] - prompts + 1] = values[trained]
    torch.distributed.all_reduce(total, group=mesh.dp_cp.group)
    torch.distributed.broadcast(total, src=mesh.pp.ranks[-1], group=mesh.pp.group)
    return total


def main() -> None:
    """Run the cases named on the command line."""
    models, output = Path(sys.argv[1]), Path(sys.argv[2])
    device.set_num_threads()
    device.start_process_group()
    for name in sys.argv[3:]:
        sys.stderr.write(f"{name}\n")
        run_case((PARITY | CONTROLS)[name], models, output)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
