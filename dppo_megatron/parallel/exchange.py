"""What moves between ranks in a step: scores to everybody, sequences once, to where they train.

Prompt p of the kept prompts is generated for by rank p % W of the W generating ranks (``PromptBatch.share``), or by
the owner that a merged batch names, so where a sequence lies is known: nothing but the payload is ever sent.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dppo_megatron.batches import (
    FloatArray,
    IntArray,
    PackedRow,
    PromptBatch,
    PrunedBatch,
    Ragged,
    RolloutBatch,
    RowPlan,
    ScoredBatch,
)
from dppo_megatron.ownership import owners_of, places_on_owners
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.mesh import Axis, Mesh
from dppo_megatron.parallel.sequence_layout import RowSequences, lay_out_row


def gather_scores(
    rollouts: RolloutBatch,
    rewards: FloatArray,
    advantages: FloatArray,
    *,
    kept: PromptBatch,
    num_generations: int,
    num_failures: int,
    over: Axis,
) -> ScoredBatch:
    """Gather every rank's rewards, advantages, lengths, finish reasons, surprises; equal on all ranks afterwards.

    rewards, advantages: float64 [n] of this rank's completions. kept: all kept prompts. num_failures: answers of
    this rank that got no verdict; their sum rides along. Called by every rank.
    """
    counts = [len(range(rank, len(kept), over.size)) for rank in range(over.size)]
    lengths, reasons = rollouts.completions.lengths, rollouts.finish_reasons
    columns = np.stack([rewards, advantages, lengths, reasons, rollouts.surprises], -1).astype(np.float64)
    rows = np.zeros((counts[over.rank], 5 * num_generations + 1))
    rows[:, :-1] = columns.reshape(counts[over.rank], 5 * num_generations)
    rows[:1, -1] = num_failures
    blocks = collectives.gather_rows(rows, over, counts=counts)
    table = np.zeros((len(kept), 5 * num_generations + 1))
    for rank, block in enumerate(blocks):
        table[rank :: over.size] = block
    failures, table = table[:, -1], table[:, :-1].reshape(-1, 5)
    return ScoredBatch(
        prompts=kept,
        num_generations=num_generations,
        rewards=table[:, 0],
        advantages=table[:, 1],
        completion_lengths=table[:, 2].astype(np.int64),
        finish_reasons=table[:, 3].astype(np.int64),
        surprises=table[:, 4],
        num_failures=int(failures.sum()),
    )


def exchange(
    rollouts: RolloutBatch,
    plan: PrunedBatch,
    rows: RowPlan,
    *,
    scores: ScoredBatch,
    token_level_loss: bool,
    mesh: Mesh,
) -> list[PackedRow]:
    """Send each kept sequence to all ranks of the data-parallel rank that trains it, and lay out this rank's rows.

    Called by every rank with the same ``plan``, ``rows`` and ``scores``. One all-to-all of token ids and sampled
    log-probs; prompts are already everywhere.
    """
    mine = _sequences_of(rows, mesh.dp.rank)
    completions, logprobs = _receive(rollouts, plan, rows, mine, scores, mesh)
    prompts = scores.prompts.tokens.take(scores.prompt_rows[plan.sequences[mine]])
    coefficients = plan.weights[mine]
    if not token_level_loss:
        coefficients = coefficients / plan.completion_lengths[mine]
    result, start = [], 0
    for row in rows.rows[mesh.dp.rank]:
        part = np.arange(start, start + len(row))
        start += len(row)
        result.append(
            lay_out_row(
                RowSequences(
                    prompts=prompts.take(part),
                    completions=completions.take(part),
                    sampled_logprobs=logprobs.take(part).values.astype(np.float32),
                    advantages=plan.advantages[mine[part]],
                    coefficients=coefficients[part],
                ),
                sequence_multiple=rows.sequence_multiple,
                row_multiple=rows.row_multiple,
                cp_size=mesh.cp.size,
                cp_rank=mesh.cp.rank,
            )
        )
    return result


def _sequences_of(rows: RowPlan, dp_rank: int) -> IntArray:
    """Indices into the plan of everything that a data-parallel rank trains, in the order of its rows."""
    return np.concatenate([np.zeros(0, np.int64), *rows.rows[dp_rank]])


def _receive(
    rollouts: RolloutBatch, plan: PrunedBatch, rows: RowPlan, mine: IntArray, scores: ScoredBatch, mesh: Mesh
) -> tuple[Ragged, Ragged]:
    """The completions and sampled log-probs of ``mine``, in that order, from the ranks that sampled them."""
    axis, group = mesh.generation, scores.num_generations
    owners, prompts = owners_of(scores, num_ranks=axis.size), plan.sequences // group
    origin = owners[prompts]
    local_row = places_on_owners(owners)[prompts] * group + plan.sequences % group
    logprobs = Ragged(rollouts.sampled_logprobs, rollouts.completions.offsets)

    payloads = {}
    for dp_rank in set(mesh.dp_rank_of):
        wanted = _sequences_of(rows, dp_rank)
        from_here = local_row[wanted[origin[wanted] == axis.rank]]
        payloads[dp_rank] = np.concatenate(
            [
                rollouts.completions.take(from_here).values.astype(np.int32),
                logprobs.take(from_here).values.astype(np.float32).view(np.int32),
            ]
        )
    sent = [payloads[dp_rank] for dp_rank in mesh.dp_rank_of]
    lengths = plan.completion_lengths[mine]
    tokens_from = np.bincount(origin[mine], weights=lengths, minlength=axis.size).astype(np.int64)
    received = collectives.exchange_flat(
        np.concatenate(sent),
        axis,
        send_counts=[len(payload) for payload in sent],
        receive_counts=(2 * tokens_from).tolist(),
    )
    order = np.argsort(origin[mine], kind="stable")
    place = np.argsort(order)
    ids, bits = _split_payloads(received, tokens_from.tolist())
    return (
        Ragged.from_lengths(ids, lengths[order]).take(place),
        Ragged.from_lengths(bits.view(np.float32), lengths[order]).take(place),
    )


def _split_payloads(
    received: NDArray[np.int32], tokens_from: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    # Each source sent its token ids, then as many log-probs.
    starts = np.concatenate([[0], np.cumsum(2 * np.asarray(tokens_from))])
    ids = [received[start : start + count] for start, count in zip(starts, tokens_from, strict=False)]
    bits = [received[start + count : start + 2 * count] for start, count in zip(starts, tokens_from, strict=False)]
    return np.concatenate(ids), np.concatenate(bits)
