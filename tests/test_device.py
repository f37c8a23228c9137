"""Where megatron-core assumes CUDA: the places that device.py redirects, so that an upgrade shows what moved."""

import json
from pathlib import Path

import pytest
import torch

from dppo_megatron import device
from tests.toy_step import make_model

WORKER = Path(__file__).parent / "invariance" / "cuda_sites_worker.py"
SITES = {
    ("dist_checkpointing.strategies.filesystem_async", "torch.cuda.synchronize"),
    ("dist_checkpointing.strategies.state_dict_saver", "torch.cuda.current_device"),
    ("distributed.param_and_grad_buffer", "torch.cuda.current_device"),
    ("optimizer.clip_grads", "Tensor.type"),
    ("optimizer.clip_grads", "zeros(device='cuda')"),
    ("optimizer.distrib_optimizer", "Tensor.cuda"),
    ("optimizer.distrib_optimizer", "Tensor.type"),
    ("optimizer.distrib_optimizer", "torch.cuda.current_device"),
    ("optimizer.optimizer", "tensor(device='cuda')"),
    ("pipeline_parallel.schedules", "zeros(device='cuda')"),
    ("tensor_parallel.random", "torch.cuda.get_rng_state"),
    ("tensor_parallel.random", "torch.cuda.manual_seed"),
    ("tensor_parallel.random", "torch.cuda.set_rng_state"),
    ("utils", "tensor(device='cuda')"),
}
"""Modules of megatron.core 0.16, and what a step, a save and a load on one process ask of CUDA there."""


def test_the_places_that_assume_cuda_are_those_known(tmp_path: Path, launch) -> None:
    make_model(tmp_path / "model", tied=True)
    launch(WORKER, tmp_path / "model", tmp_path / "sites.json", num_processes=1)
    found = {
        (module.removeprefix("megatron.core."), what)
        for module, what in json.loads((tmp_path / "sites.json").read_text())
    }
    assert found == SITES


def test_outside_megatron_calls_a_cuda_device_stays_an_error() -> None:
    # The redirection must not hide a user's or our own mistake.
    if device.has_gpu():
        return
    with device.megatron_calls():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        with device.direct_calls(), pytest.raises((AssertionError, RuntimeError), match="CUDA"):
            torch.zeros(1, device="cuda")
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        torch.zeros(1, device="cuda")
