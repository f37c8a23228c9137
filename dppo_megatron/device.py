"""Everything that differs between CUDA and CPU, and between megatron-core versions.

megatron-core assumes CUDA in a few dozen places. Where no GPU is present, ``install_cpu_substitutes`` replaces
the functions it calls on ``torch.cuda``, and ``megatron_calls`` redirects, while megatron-core's own code runs,
the ``device="cuda"`` literals, ``Tensor.cuda()`` and pinned memory that no public switch turns off. With a GPU
both do nothing. ``sites`` counts the places that were redirected, so that a test can show what a new version of
megatron-core has moved.
"""

import collections
import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

sites: collections.Counter[tuple[str, str]] = collections.Counter()
"""(module of megatron.core, what it asked of CUDA) -> times, filled while ``trace_sites`` is set."""

trace_sites = False


def has_gpu() -> bool:
    """Whether this process trains on a GPU."""
    return torch.cuda.is_available()


def current() -> torch.device:
    """The device that this process trains on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


_PEAK_FLOPS = (
    # By a part of the device's name: dense bfloat16 operations a second, from the vendors' data sheets.
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
)


def peak_flops(precision: str) -> float | None:
    """This device's dense operations a second in bfloat16; None for another precision, a CPU, an unknown device."""
    if not has_gpu() or precision != "bfloat16":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAK_FLOPS if part in name), None)


def has_transformer_engine() -> bool:
    """Whether this process can run Transformer Engine's layers: a GPU, and its compiled module."""
    return has_gpu() and importlib.util.find_spec("transformer_engine_torch") is not None


def names() -> list[str]:
    """Names of the GPUs that torch sees."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if has_gpu() else []


def backends() -> tuple[str, ...]:
    """Communication backends that a run on this device uses."""
    return ("gloo", "nccl") if has_gpu() else ("gloo",)


def use(chosen: torch.device) -> None:
    """Make a thread work on the process's device: a new thread would start on the first one."""
    if has_gpu():
        torch.cuda.set_device(chosen)


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """Put torch's random states, the host's and this process's device's, back afterwards."""
    with torch.random.fork_rng(devices=[current()] if has_gpu() else []):
        yield


def start_process_group(*, timeout_minutes: int = 30) -> None:
    """Join the process group that the environment describes (torchrun's or srun's variables), or one alone."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if has_gpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if has_gpu() else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if os.environ["WORLD_SIZE"] == "1" and "MASTER_PORT" not in os.environ:
        # A store in memory: a single process needs no port, so two runs on one host cannot collide.
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    else:
        torch.distributed.init_process_group(backend, timeout=timeout)
    install_cpu_substitutes()


def set_num_threads() -> None:
    """Give this process its share of the host's cores for CPU kernels, unless OMP_NUM_THREADS says otherwise.

    A process alone takes one thread too: the kernels of models small enough for a CPU run slower on more.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def seed_random_states(seed: int) -> None:
    """Seed Python-side and model-parallel generators (initialisation, dropout)."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with megatron_calls():
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)


def synchronize() -> None:
    """Wait for the device, so that a stage's wall time is its own."""
    if has_gpu():
        torch.cuda.synchronize()


def release_cached_memory() -> None:
    """Return cached device memory, for the other tenant of a colocated GPU."""
    if has_gpu():
        torch.cuda.empty_cache()


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Pinned host memory where a GPU will copy from it."""
    return tensor.pin_memory() if has_gpu() else tensor


def upload(array: NDArray[np.generic]) -> torch.Tensor:
    """An array of the host on the training device, without a wait."""
    return pin(torch.from_numpy(array)).to(current(), non_blocking=True)


def give_adam_its_state(optimizer: Any) -> None:
    """Create Adam's state, all zeros, as its first step would.

    torch's AdamW (used where neither Transformer Engine nor apex is present) creates its state at its first step.
    Without it megatron-core loads no checkpoint into a distributed optimizer, and one that was saved before any
    step has trained (no completion had an advantage) cannot be loaded at all.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = getattr(part, "optimizer", None)
        if not isinstance(adam, torch.optim.AdamW):
            continue
        for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def restore_first_steps(state: Any) -> None:
    """Put a step count of 0 back into an optimizer's loaded state, wherever moments stand without one.

    megatron-core saves the count apart and leaves it out where it is 0; torch's AdamW then finds none.
    """
    if not isinstance(state, dict):
        return
    if {"exp_avg", "exp_avg_sq"} <= state.keys():
        state.setdefault("step", torch.tensor(0.0))
        return
    for part in state.values():
        restore_first_steps(part)


def separate_adam_steps(optimizer: Any) -> None:
    """Give each parameter its own ``step`` tensor after a checkpoint was loaded.

    megatron-core's ``DistributedOptimizer.load_state_dict`` hands one tensor to all parameters; torch's AdamW
    then counts one step once per parameter, silently.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in getattr(part.optimizer, "state", {}).values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


def _megatron_caller() -> str | None:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("megatron.core"):
            return name
        frame = frame.f_back
    return None


def _count(what: str) -> None:
    if trace_sites and (caller := _megatron_caller()):
        sites[caller, what] += 1


class _CudaMeansCpu(TorchFunctionMode):
    """Run on the CPU what megatron-core asks of a GPU by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            _count("Tensor.cuda")
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Optimizers sort parameters by the names of CUDA tensor types.
            _count("Tensor.type")
            return func(*args).replace("torch.", "torch.cuda.")
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            _count(f"{getattr(func, '__name__', func)}(device='cuda')")
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            _count("pin_memory")
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


@contextlib.contextmanager
def megatron_calls() -> Iterator[None]:
    """Around calls into megatron-core: without a GPU, what it asks of CUDA runs on the CPU."""
    if has_gpu():
        yield
        return
    with _CudaMeansCpu():
        yield


@contextlib.contextmanager
def direct_calls() -> Iterator[None]:
    """Within ``megatron_calls``, around code that names no device: its calls of torch are not looked at.

    Looking costs some 4 microseconds a call, which a tiny model's forward pass feels. What asks for CUDA here
    after all fails at once.
    """
    if has_gpu():
        yield
        return
    with torch._C.DisableTorchFunction():
        yield


_installed = False


def install_cpu_substitutes() -> None:
    """Replace, once, the functions of ``torch.cuda`` that megatron-core calls; nothing where a GPU is present."""
    global _installed
    if has_gpu() or _installed:
        return
    _installed = True

    def substitute(name: str, result: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            _count(f"torch.cuda.{name}")
            return result(*args, **kwargs)

        return call

    def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    replacements = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": get_rng_state,
        "manual_seed": torch.manual_seed,
        "current_stream": torch.cpu.current_stream,  # megatron-core 0.19, before it reduces gradients
    }
    for name, result in replacements.items():
        setattr(torch.cuda, name, substitute(name, result))

    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    megatron_random._get_cuda_rng_state = substitute("get_rng_state", get_rng_state)
    megatron_random._set_cuda_rng_state = substitute("set_rng_state", set_rng_state)
    _keep_adam_step_on_load(DistributedOptimizer)


def _keep_adam_step_on_load(optimizer_class: Any) -> None:
    # torch's AdamW keeps ``step`` in a parameter's state; checkpoints restore it through the parameter groups
    # alone, and megatron-core then looks for it among the tensors of the checkpoint.
    original = optimizer_class._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = {"step": state["step"]} if "step" in state else {}
        original(self, model_param, {**tensors, **step})

    optimizer_class._set_main_param_and_optimizer_states = with_step
