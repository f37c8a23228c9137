"""What vLLM does to the process that it runs in, and what keeps it from lasting."""

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dppo_megatron import device

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process, in step with its peers
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output is the run's table
}


def apply_settings() -> None:
    """Set what vLLM reads from the environment when it is imported, where the user has set nothing else."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


@contextmanager
def contained() -> Iterator[None]:
    """Around vLLM's import and construction: put back what it changes in the process and does not need later.

    Those are environment variables (its own, ``VLLM_...``, stay), the random states of Python, numpy and torch,
    the processor affinity, the number of threads and, replaced by a warning on CPUs, ``torch.set_num_threads``;
    and the objects that it hides from Python's garbage collector, the trainer's among them.
    Off the GPU ``torch.accelerator``'s functions stay replaced, because the engine calls them at each step.
    """
    environment, affinity = dict(os.environ), os.sched_getaffinity(0)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    with device.kept_random_states():
        try:
            yield
        finally:
            for name in [name for name in os.environ if name not in environment and not name.startswith("VLLM_")]:
                del os.environ[name]
            os.environ.update(environment)
            gc.unfreeze()
            os.sched_setaffinity(0, affinity)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(num_threads)
