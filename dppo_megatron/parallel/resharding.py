"""Which part of which shard every rank sends where, from the trainer's layout to the engine's: pure, no tensors.

Both layouts stand on the same ranks. A rank of the trainer holds Megatron's fused and padded shards; a rank of the
engine wants its own rows or columns of every Hugging Face tensor, and nothing else of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dppo_megatron.architecture import Architecture
from dppo_megatron.parallel.hf_names import Fusion, Parameter, model_parameters
from dppo_megatron.plan import Layout

_VOCABULARY_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True, slots=True)
class Slab:
    """An interval of a Hugging Face tensor. dim: the one that is cut; start, stop: along it, in the whole tensor.

    offset: where the interval begins in its holder's own tensor, along the same dimension.
    """

    hf_name: str
    dim: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One interval that one rank has and one rank wants, possibly the same; ranks are the world's.

    parameter: the sender's, by its name in the whole model. slab: its offset is in the sender's shard.
    """

    source: int
    target: int
    parameter: str
    slab: Slab


def plan_transfers(
    architecture: Architecture,
    *,
    layout: Layout,
    stage_of: tuple[int, ...],
    engine_tp: int,
    rank: int | None = None,
) -> tuple[Transfer, ...]:
    """Everything that must move for each rank to hold its engine shard, each element once.

    stage_of: the pipeline stage of every parameter of the table. What a rank has itself it takes from itself; of
    replicas that hold the same, targets take turns. A tied output layer is the embedding, which comes once.
    rank: only the transfers from or to this one, in the same order.
    """
    assert layout.world_size % engine_tp == 0
    wanted = [
        {slab.hf_name: slab for slab in engine_slabs(architecture, tp=engine_tp, rank=rank)}
        for rank in range(engine_tp)
    ]
    transfers = []
    for parameter, stage in zip(model_parameters(architecture, tp=layout.tp), stage_of, strict=True):
        for tp_rank in range(1 if parameter.tp_dim is None else layout.tp):
            holders = _holders(layout, stage=stage, tp_rank=None if parameter.tp_dim is None else tp_rank)
            for held in trainer_slabs(parameter, architecture, tp=layout.tp, rank=tp_rank):
                for target in range(layout.world_size):
                    part = _overlap(held, wanted[target % engine_tp][held.hf_name])
                    if part is None:
                        continue
                    source = target if target in holders else holders[target % len(holders)]
                    if rank is None or rank in (source, target):
                        transfers.append(Transfer(source, target, parameter.name, part))
    return tuple(transfers)


def _holders(layout: Layout, *, stage: int, tp_rank: int | None) -> list[int]:
    # Megatron's order of ranks: tp, cp, dp, pp. A parameter that TP does not cut lies on all of its ranks.
    replicas = layout.cp * layout.dp
    ranks = range(layout.tp) if tp_rank is None else (tp_rank,)
    return [layout.tp * (replicas * stage + replica) + rank for replica in range(replicas) for rank in ranks]


def _overlap(held: Slab, wanted: Slab) -> Slab | None:
    # A tensor that one side does not cut has the cut of the other.
    if held.dim != wanted.dim and held.offset == held.start == 0 and wanted.start == 0:
        raise AssertionError(f"{held.hf_name} is cut along {held.dim} here and {wanted.dim} there")
    start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
    if start >= stop:
        return None
    return Slab(held.hf_name, held.dim, start, stop, held.offset + start - held.start)


def trainer_slabs(parameter: Parameter, architecture: Architecture, *, tp: int, rank: int) -> Iterator[Slab]:
    """What rank ``rank`` of ``tp`` holds of a parameter, interval by interval in its shard; padding left out."""
    names = parameter.hf_names
    if parameter.tp_dim is None:
        yield Slab(names[0], 0, 0, parameter.shape[0], 0)
        return
    size = parameter.shape[parameter.tp_dim] // tp
    if parameter.fusion is Fusion.QKV:
        yield from _qkv_slabs(names, architecture, start=rank * size, stop=(rank + 1) * size)
    elif parameter.fusion is Fusion.GATE_UP:
        half = size // 2
        for number, name in enumerate(names):
            yield Slab(name, 0, rank * half, (rank + 1) * half, number * half)
    elif parameter.fusion is Fusion.VOCABULARY:
        stop = min((rank + 1) * size, architecture.vocab_size)
        if rank * size < stop:
            yield Slab(names[0], 0, rank * size, stop, 0)
    else:
        yield Slab(names[0], parameter.tp_dim, rank * size, (rank + 1) * size, 0)


def _qkv_slabs(names: tuple[str, ...], architecture: Architecture, *, start: int, stop: int) -> Iterator[Slab]:
    """Rows start to stop of the fused tensor: for each kv head its query heads, its key head, its value head."""
    head_dim, groups = architecture.head_dim, architecture.num_key_value_heads
    query_rows = architecture.num_attention_heads // groups * head_dim
    first = 0
    for group in range(groups):
        for name, rows in zip(names, (query_rows, head_dim, head_dim), strict=True):
            begin, end = max(start, first), min(stop, first + rows)
            if begin < end:
                yield Slab(name, 0, group * rows + begin - first, group * rows + end - first, begin - start)
            first += rows


def engine_slabs(architecture: Architecture, *, tp: int, rank: int) -> Iterator[Slab]:
    """What rank ``rank`` of an engine of ``tp`` ranks wants, one interval a tensor.

    Fewer kv heads than ranks are shared by neighbours. Source: vLLM's VocabParallelEmbedding, QKVParallelLinear,
    MergedColumnParallelLinear and RowParallelLinear.
    """
    kv_ranks = min(tp, architecture.num_key_value_heads)
    padded = -(-architecture.vocab_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    for parameter in model_parameters(architecture, tp=1):
        for number, name in enumerate(parameter.hf_names):
            dim, size = parameter.tp_dim or 0, parameter.shape[parameter.tp_dim or 0]
            cuts, place, stop = tp, rank, None
            if parameter.tp_dim is None:
                cuts, place = 1, 0
            elif parameter.fusion is Fusion.VOCABULARY:
                size, stop = padded, architecture.vocab_size
            elif parameter.fusion is Fusion.GATE_UP:
                size //= 2
            elif parameter.fusion is Fusion.QKV:
                heads = (architecture.num_attention_heads, *[architecture.num_key_value_heads] * 2)[number]
                size = heads * architecture.head_dim
                if number:
                    cuts, place = kv_ranks, rank * kv_ranks // tp
            each = size // cuts
            start, end = place * each, (place + 1) * each
            yield Slab(name, dim, start, end if stop is None else max(start, min(end, stop)), 0)


def received_elements(transfers: tuple[Transfer, ...], architecture: Architecture, *, rank: int) -> int:
    """Elements that a rank gets from others under a plan; a gather of everything brings all but its own shard."""
    widths = {}
    for parameter in model_parameters(architecture, tp=1):
        other = [size for dim, size in enumerate(parameter.shape) if dim != (parameter.tp_dim or 0)]
        widths |= dict.fromkeys(parameter.hf_names, other[0] if other else 1)
    return sum(
        (one.slab.stop - one.slab.start) * widths[one.slab.hf_name]
        for one in transfers
        if one.target == rank != one.source
    )
