"""Start a run's processes on this machine, or join those that torchrun or srun has started."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from dppo_megatron.plan import Layout


def is_joined(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of several."""
    return "RANK" in environment or int(environment.get("SLURM_NTASKS", "1")) > 1


def adopt_slurm_variables() -> None:
    """Give torch the ranks that srun states; torchrun's own variables win."""
    if "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) <= 1:
        return
    for name, slurm_name in (
        ("RANK", "SLURM_PROCID"),
        ("WORLD_SIZE", "SLURM_NTASKS"),
        ("LOCAL_RANK", "SLURM_LOCALID"),
    ):
        os.environ[name] = os.environ[slurm_name]
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"srun has started this process, but {' and '.join(missing)} is not set: export it in the job"
        )


def start_processes(arguments: Sequence[str], *, layout: Layout, num_nodes: int) -> int:
    """Run ``python -m dppo_megatron ARGUMENTS`` on every rank of a layout on this machine; returns the exit code.

    Raises ValueError for more than one machine: a launcher must start those.
    """
    if num_nodes > 1:
        raise ValueError(
            f"cluster.num_nodes: {num_nodes}; start the processes of several machines with torchrun or srun "
            f"({layout.world_size} in all), each of them running this command"
        )
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The rank that failed has said why; the launcher's own report would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=layout.world_size,
        run_id=f"dppo-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(launch, sys.executable)("-m", "dppo_megatron", *arguments)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        return next((code for code in codes if code > 0), 1)
    return 0
