"""What megatron-core does in silence on a CPU, and what is done about each."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from suite import Suite

from dppo_megatron import device
from dppo_megatron.parallel import checkpoint
from dppo_megatron.parallel.mesh import open_mesh
from dppo_megatron.plan import Layout

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_a_step_tensor_shared_by_parameters_is_separated_after_a_load() -> None:
    def optimizer_of(values: list[torch.Tensor]) -> torch.optim.AdamW:
        optimizer = torch.optim.AdamW(values, lr=0.1, foreach=False)
        for _ in range(2):
            for value in values:
                value.grad = torch.ones_like(value)
            optimizer.step()
        return optimizer

    def parameters() -> list[torch.Tensor]:
        return [torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)]

    ours, theirs = parameters(), parameters()
    loaded, plain = optimizer_of(ours), optimizer_of(theirs)
    shared = torch.tensor(2.0)
    for state in loaded.state.values():
        state["step"] = shared
    device.separate_adam_steps(SimpleNamespace(optimizer=loaded))
    for values, optimizer in ((ours, loaded), (theirs, plain)):
        for value in values:
            value.grad = torch.full_like(value, -3.0)
        optimizer.step()
    assert [float(state["step"]) for state in loaded.state.values()] == [3, 3]
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_without_psutil_the_program_does_not_start_where_megatron_core_would_hang_in_save() -> None:
    script = "import sys; sys.modules['psutil'] = None; import dppo_megatron.parallel.checkpoint"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "psutil" in result.stderr.splitlines()[-1]
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    assert any(dependency.startswith("psutil") for dependency in dependencies)


def test_saving_starts_no_process_that_would_outlive_a_killed_rank(tmp_path: Path) -> None:
    before = psutil.Process().children(recursive=True)
    state = {"weight": ShardedTensor.from_rank_offsets("weight", torch.ones(3))}
    layout = Layout(tp=1, pp=1, cp=1, dp=1, sequence_parallel=False)
    with open_mesh(layout, seed=0), device.megatron_calls():
        checkpoint.dist_checkpointing.save(state, str(tmp_path))
    assert (tmp_path / ".metadata").is_file()
    assert psutil.Process().children(recursive=True) == before


def test_micro_batches_are_summed_where_megatron_core_would_take_their_mean(suite: Suite) -> None:
    # Three rows: its mean is a third of the sum, and clipping then hides it from every parameter.
    whole, averaged = suite.outcomes["tied-one"], suite.outcomes["tied-one-mean_per_micro_batch"]
    assert float(averaged["grad_norm.0"]) == pytest.approx(float(whole["grad_norm.0"]) / 3, rel=1e-5)
    assert float(whole["grad_norm.0"]) == pytest.approx(
        float(suite.plain("tied", "float32")["grad_norm.0"]), rel=1e-6
    )
