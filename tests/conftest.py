"""What tests share: launches of worker scripts on several processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.make_tiny_model import make_tiny_model

Launch = Callable[..., None]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a few steps of its warm start, with its data."""
    output = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(output, seed=0, steps=40)
    return output


@pytest.fixture(scope="session")
def launch() -> Launch:
    """Run ``script arguments...`` on ``num_processes`` processes under torchrun; fail with its output."""

    def run(script: Path, *arguments: str | Path, num_processes: int, timeout_seconds: int = 240) -> None:
        command = [sys.executable, "-W", "ignore"]
        if num_processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
        # Scripts find what tests share: toy_step, and the reward of whole runs.
        here = Path(__file__).parent
        path = os.pathsep.join([str(here), str(here / "end_to_end"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        result = subprocess.run(
            [*command, str(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env=environment,
            check=False,
        )
        if result.returncode:
            pytest.fail(f"{script.name} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"[-6000:])

    return run
