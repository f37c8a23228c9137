"""A mesh that is taken down leaves nothing of itself in a process that goes on."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from dppo_megatron import device
from dppo_megatron.parallel.mesh import lay_out, open_mesh, take_down
from dppo_megatron.plan import Layout

ALONE = Layout(tp=1, pp=1, cp=1, dp=1, sequence_parallel=False)


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone."""
    device.start_process_group()
    yield
    dist.destroy_process_group()


def num_groups() -> int:
    """How many process groups this process holds, the world included."""
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.usefixtures("world")
def test_a_mesh_in_a_standing_world_is_taken_down_with_its_groups() -> None:
    with open_mesh(ALONE, seed=0) as mesh:
        assert mesh.world.size == 1
        assert num_groups() > 10
    assert num_groups() == 1
    assert not parallel_state.model_parallel_is_initialized()


@pytest.mark.usefixtures("world")
def test_a_mesh_that_is_replaced_goes_with_its_groups() -> None:
    lay_out(ALONE, seed=0)
    once = num_groups()
    lay_out(ALONE, seed=0)
    assert num_groups() == once
    take_down()


def test_a_mesh_takes_the_world_that_it_joined_down_with_it() -> None:
    for _ in range(2):
        with open_mesh(ALONE, seed=0):
            assert dist.is_initialized()
        assert not dist.is_initialized()
