"""The weight stream for engines of several ranks: each rank gets its own part of every tensor, and no other.

Where the engine's tensor parallelism is the trainer's nearly everything is there already; a gather of whole tensors
would bring every rank what it throws away.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dppo_megatron.architecture import Architecture
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.hf_fusion import hf_shapes
from dppo_megatron.parallel.hf_names import Parameter
from dppo_megatron.parallel.hf_weights import StageParameters, buckets
from dppo_megatron.parallel.mesh import Mesh
from dppo_megatron.parallel.resharding import Slab, Transfer, plan_transfers
from dppo_megatron.plan import Layout


@dataclass(frozen=True, slots=True)
class Routes:
    """One rank's transfers by parameter name, each list in the order of the plan, which all ranks share."""

    own: dict[str, list[Transfer]]
    sent: dict[str, list[Transfer]]
    received: dict[str, list[Transfer]]


@lru_cache(maxsize=1)  # the layouts of a run do not change, and a plan for a thousand ranks takes seconds
def plan_routes(
    architecture: Architecture, *, layout: Layout, stage_of: tuple[int, ...], engine_tp: int, rank: int
) -> Routes:
    """What of the plan concerns a rank of the world."""
    routes = Routes({}, {}, {})
    for transfer in plan_transfers(architecture, layout=layout, stage_of=stage_of, engine_tp=engine_tp, rank=rank):
        is_own = transfer.source == transfer.target
        kind = routes.own if is_own else routes.sent if transfer.source == rank else routes.received
        kind.setdefault(transfer.parameter, []).append(transfer)
    return routes


def stream_parts(
    parameters: StageParameters, *, mesh: Mesh, engine_tp: int, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor, in the table's order on every rank, of which only this rank's part is set.

    The part is what rank ``world rank % engine_tp`` of an engine cuts out for itself; the rest is memory that
    nothing was written to. Called by every rank of the world. One all-to-all a bucket of ``bucket_bytes`` of each
    rank's shards (one parameter may exceed it). A tied embedding comes again as ``lm_head.weight``.
    """
    routes = plan_routes(
        parameters.architecture,
        layout=mesh.layout,
        stage_of=parameters.stage_of,
        engine_tp=engine_tp,
        rank=mesh.world.rank,
    )
    for bucket in buckets(parameters, mesh.tp.size, bucket_bytes):
        rows = [parameters.table[number] for number in bucket]
        yield from _parts(rows, parameters=parameters, routes=routes, mesh=mesh).items()
    if parameters.architecture.tied:
        ((_, embedding),) = _parts(parameters.table[:1], parameters=parameters, routes=routes, mesh=mesh).items()
        yield "lm_head.weight", embedding


def _parts(
    rows: Sequence[Parameter], *, parameters: StageParameters, routes: Routes, mesh: Mesh
) -> dict[str, Tensor]:
    """The tensors of a bucket by name, this rank's part of them set."""
    example = next(iter(parameters.local.values()))
    tensors = {
        name: example.new_empty(shape)
        for row in rows
        for name, shape in zip(row.hf_names, hf_shapes(row, parameters.architecture), strict=True)
    }

    def chosen(kind: dict[str, list[Transfer]]) -> list[Transfer]:
        return [transfer for row in rows for transfer in kind.get(row.name, ())]

    def held(transfer: Transfer) -> Tensor:
        slab = transfer.slab
        return parameters.local[transfer.parameter].narrow(slab.dim, slab.offset, slab.stop - slab.start)

    def place(slab: Slab) -> Tensor:
        return tensors[slab.hf_name].narrow(slab.dim, slab.start, slab.stop - slab.start)

    for transfer in chosen(routes.own):
        place(transfer.slab).copy_(held(transfer))
    sent = sorted(chosen(routes.sent), key=lambda transfer: transfer.target)
    received = sorted(chosen(routes.received), key=lambda transfer: transfer.source)
    send_counts, receive_counts = [0] * mesh.world.size, [0] * mesh.world.size
    pieces = [held(transfer).flatten() for transfer in sent]
    for transfer, piece in zip(sent, pieces, strict=True):
        send_counts[transfer.target] += piece.numel()
    targets = [place(transfer.slab) for transfer in received]
    for transfer, target in zip(received, targets, strict=True):
        receive_counts[transfer.source] += target.numel()
    flat = collectives.exchange_tensors(
        torch.cat([example.new_empty(0), *pieces]),
        mesh.world,
        send_counts=send_counts,
        receive_counts=receive_counts,
    )
    for target, piece in zip(targets, flat.split([target.numel() for target in targets]), strict=True):
        target.copy_(piece.view(target.shape))
    return tensors
