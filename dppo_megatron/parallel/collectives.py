"""Every collective that is ours. Each says who calls it and what is then equal where.

Arrays travel as tensors on the training device (NCCL takes no others); a caller never branches on its rank
around one of these.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dppo_megatron import device
from dppo_megatron.parallel.mesh import Axis

T = TypeVar("T")


def gather_rows(rows: NDArray[np.float64], axis: Axis, *, counts: Sequence[int]) -> list[NDArray[np.float64]]:
    """Gather [count_r, width] float64 rows of every rank r; afterwards all ranks of the axis hold the same list.

    Called by every rank of ``axis``, with the same ``counts`` (rows of each rank) and width. Source:
    all-gather of equal blocks, padded to the longest.
    """
    if axis.size == 1:
        return [rows]
    width = rows.shape[1]
    padded = torch.zeros(max(counts), width, dtype=torch.float64, device=device.current())
    padded[: len(rows)] = torch.from_numpy(np.ascontiguousarray(rows)).to(padded.device)
    gathered = torch.empty(axis.size * max(counts), width, dtype=torch.float64, device=padded.device)
    dist.all_gather_into_tensor(gathered, padded, group=axis.group)
    blocks = gathered.cpu().numpy().reshape(axis.size, max(counts), width)
    return [block[:count] for block, count in zip(blocks, counts, strict=True)]


def exchange_flat(
    values: NDArray[np.int32], axis: Axis, *, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> NDArray[np.int32]:
    """Send ``send_counts[r]`` of the flat values to each rank r; return what all ranks sent here, in rank order.

    Called by every rank of ``axis``; counts agree pairwise. Afterwards each rank holds its own share.
    """
    if axis.size == 1:
        return values
    sent = torch.from_numpy(np.ascontiguousarray(values)).to(device.current())
    return exchange_tensors(sent, axis, send_counts=send_counts, receive_counts=receive_counts).cpu().numpy()


def exchange_tensors(
    values: Tensor, axis: Axis, *, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Tensor:
    """``exchange_flat`` of a flat tensor on the training device, of any type."""
    if axis.size == 1:
        return values
    received = values.new_empty(sum(receive_counts))
    dist.all_to_all_single(received, values, list(receive_counts), list(send_counts), group=axis.group)
    return received


def gather_shards(local: Tensor, axis: Axis) -> Tensor:
    """Stack a flat tensor [n] of every rank to [size, n]; afterwards equal on all ranks of the axis."""
    if axis.size == 1:
        return local[None]
    gathered = torch.empty(axis.size * local.numel(), dtype=local.dtype, device=local.device)
    dist.all_gather_into_tensor(gathered, local.contiguous(), group=axis.group)
    return gathered.view(axis.size, -1)


def broadcast(values: Tensor, axis: Axis, *, source: int) -> Tensor:
    """Overwrite ``values`` with those of rank ``source`` of the axis; afterwards equal on all of its ranks."""
    if axis.size > 1:
        dist.broadcast(values, src=axis.ranks[source], group=axis.group)
    return values


def sum_over(values: Tensor, axis: Axis) -> Tensor:
    """Sum a tensor over the axis, in place; afterwards equal on all of its ranks."""
    if axis.size > 1:
        dist.all_reduce(values, group=axis.group)
    return values


def max_over(values: Tensor, axis: Axis) -> Tensor:
    """Maximum of a tensor over the axis, in place; afterwards equal on all of its ranks."""
    if axis.size > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=axis.group)
    return values


def any_rank(flag: bool, axis: Axis) -> bool:
    """Whether any rank of the axis passed true; called by, and equal on, all of its ranks."""
    if axis.size == 1:
        return flag
    return bool(max_over(torch.tensor(float(flag), device=device.current()), axis).item())


def sum_array(values: NDArray[np.float64], axis: Axis) -> NDArray[np.float64]:
    """Sum a float64 array over the axis; afterwards every rank holds the same sum."""
    if axis.size == 1:
        return values
    return sum_over(torch.from_numpy(values).to(device.current()), axis).cpu().numpy()


def require_equal(digest: int, axis: Axis, *, what: str) -> None:
    """Raise RuntimeError on all ranks of the axis unless every rank passed the same 63-bit digest."""
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device=device.current())
    largest, minus_smallest = max_over(bounds, axis).tolist()
    if largest != -minus_smallest:
        raise RuntimeError(f"{what} differ between ranks of the axis {axis.name}: the run would diverge")


def gather_objects(value: T, axis: Axis) -> list[T]:
    """Gather a picklable value of every rank; afterwards equal on all ranks of the axis.

    Slow: for what is written to files, not for the step.
    """
    if axis.size == 1:
        return [value]
    gathered: list[T | None] = [None] * axis.size
    dist.all_gather_object(gathered, value, group=axis.group)
    return gathered  # type: ignore[return-value]


def gather_clocks(backend: str, *, timeout_seconds: float) -> list[float]:
    """Wall clocks of all ranks after a barrier, for a group made and unmade here; called by every rank of a launch.

    Raises: RuntimeError where the ranks do not meet in time.
    """
    place = device.current() if backend != "gloo" else torch.device("cpu")
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    try:
        dist.barrier()
        mine = torch.tensor(time.time(), dtype=torch.float64, device=place)
        everybody = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine)
        return [float(clock) for clock in everybody]
    finally:
        dist.destroy_process_group()


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis has come here."""
    if axis.size > 1:
        dist.barrier(group=axis.group)
