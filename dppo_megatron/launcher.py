"""Start a run's processes on this machine, or join those that torchrun or srun has started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from dppo_megatron.plan import Layout
from dppo_megatron.stop_request import EXIT_RESUME, SIGNALS
from dppo_megatron.watchdog import PARENT

_POLL_SECONDS = 0.05


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

    SIGTERM and SIGUSR1 are passed on and all ranks given the time they need to save; when a rank fails the others
    are killed. Raises ValueError for more than one machine: a launcher must start those.
    """
    if num_nodes > 1:
        raise ValueError(
            f"cluster.num_nodes: {num_nodes}; start the processes of several machines with torchrun or srun "
            f"({layout.world_size} in all), each of them running this command"
        )
    from torch.distributed import TCPStore

    # The ranks meet at a store in this process: no port is chosen before it is bound.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(layout.world_size),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        PARENT: str(os.getpid()),
    }
    return _supervise(
        [
            subprocess.Popen(
                [sys.executable, "-m", "dppo_megatron", *arguments],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(layout.world_size)
        ]
    )


def _supervise(ranks: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait for all ranks, or until one fails: then kill the rest. Returns the first failure's exit code, or 0."""

    def forward(number: int, _: object) -> None:
        for rank in ranks:
            rank.send_signal(number)  # nothing where the rank has ended

    previous = [(one, signal.signal(one, forward)) for one in SIGNALS]
    try:
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, EXIT_RESUME)]
            if failed or None not in codes:
                break
            time.sleep(_POLL_SECONDS)
        if not failed:
            return max(code or 0 for code in codes)
        code = codes[failed[0]] or 0
        if code < 0:
            sys.stderr.write(f"dppo: error: rank {failed[0]} was killed by {signal.Signals(-code).name}\n")
        return code if code > 0 else 128 - code
    finally:
        for rank in ranks:
            rank.kill()  # SIGKILL ends a stopped process too
            rank.wait()
        for one, handler in previous:
            signal.signal(one, handler)
