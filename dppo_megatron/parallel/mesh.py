"""The mesh: named axes of processes, and the only reader of Megatron's group state."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from dppo_megatron import device
from dppo_megatron.plan import Layout


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh: this process is ``rank`` of ``size`` in ``group``; ``ranks`` are global."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, name: str, group: dist.ProcessGroup) -> "Axis":
        """Wrap a process group."""
        return cls(name, group.size(), group.rank(), group, tuple(dist.get_process_group_ranks(group)))

    @property
    def is_first(self) -> bool:
        """Whether this process is the axis's first."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process is the axis's last."""
        return self.rank == self.size - 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of a run. ``dp_cp``: data and context parallel together, over which gradients are summed.

    stage: all ranks of one pipeline stage, over which delayed FP8 scales agree.
    generation: the axis over which prompts are shared out for rollouts; every rank generates.
    """

    layout: Layout
    world: Axis
    tp: Axis
    pp: Axis
    cp: Axis
    dp: Axis
    dp_cp: Axis
    stage: Axis
    generation: Axis
    groups: ProcessGroupCollection

    @property
    def dp_rank_of(self) -> tuple[int, ...]:
        """The data-parallel rank of every global rank, by Megatron's order tp-cp-dp-pp."""
        layout = self.layout
        inner = layout.tp * layout.cp
        return tuple(rank // inner % layout.dp for rank in range(self.world.size))


def split_axis(axis: Axis, size: int, *, name: str) -> Axis:
    """Cut an axis into runs of ``size`` neighbours; each process gets the run that it stands in.

    Called by every rank of the world, the axis being the world's. Source: the layout of vLLM's tensor parallelism.
    """
    assert axis.size % size == 0
    if size == axis.size:
        return Axis(name, axis.size, axis.rank, axis.group, axis.ranks)
    runs = [list(axis.ranks[start : start + size]) for start in range(0, axis.size, size)]
    groups = [dist.new_group(run) for run in runs]
    group = groups[axis.rank // size]
    assert isinstance(group, dist.ProcessGroup)
    return Axis.of(name, group)


@contextmanager
def open_mesh(layout: Layout, *, seed: int) -> Iterator[Mesh]:
    """Join the processes of a run, lay them out, and take the mesh down at the end.

    A process group that is there already is used and left standing, so that one launch can hold several runs.
    Raises ValueError when the number of processes is not the layout's.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != layout.world_size:
        raise ValueError(
            f"{world_size} processes were started, but the layout needs {layout.world_size}: tensor {layout.tp} "
            f"x pipeline {layout.pp} x context {layout.cp} x data {layout.dp} parallel; set cluster.gpus_per_node "
            "and cluster.num_nodes to what was started"
        )
    device.set_num_threads()
    owned = not dist.is_initialized()
    if owned:
        device.start_process_group()
    try:
        yield lay_out(layout, seed=seed)
    finally:
        if owned:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()  # of the world, which takes all others with it
        else:
            take_down()


def take_down() -> None:
    """Destroy the groups of the mesh that is laid out, if any; the world stays.

    ``destroy_model_parallel`` only forgets them. With gloo each keeps three threads and its connections, and every
    message of a process with hundreds of groups gets slower: a launch of fifty layouts held 2,500 threads a rank.
    """
    groups = parallel_state._global_process_group_list or [None]
    for group in dict.fromkeys(groups[1:]):  # the first stands for the world
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def lay_out(layout: Layout, *, seed: int) -> Mesh:
    """Lay the joined processes out; a mesh laid out before is taken down."""
    take_down()
    with device.megatron_calls():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.virtual_pp if layout.virtual_pp > 1 else None,
            context_parallel_size=layout.cp,
        )
    device.seed_random_states(seed)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    assert dist.group.WORLD is not None
    world = Axis.of("world", dist.group.WORLD)
    return Mesh(
        layout=layout,
        world=world,
        tp=Axis.of("tp", groups.tp),
        pp=Axis.of("pp", groups.pp),
        cp=Axis.of("cp", groups.cp),
        dp=Axis.of("dp", groups.dp),
        dp_cp=Axis.of("dp_cp", groups.dp_cp),
        stage=Axis.of("stage", groups.tp_dp_cp),
        generation=world,
        groups=groups,
    )
