"""What tests share: launches of worker scripts on several processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tools.make_tiny_model import make_tiny_model

Launch = Callable[..., None]
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a process that joins a process group finds, or puts, into its environment."""


@pytest.fixture(autouse=True, scope="module")
def without_a_place() -> Iterator[None]:
    """A module that joins a group in this process leaves its place to no later one, nor to what that starts."""
    yield
    for name in PLACE:
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a few steps of its warm start, with its data."""
    output = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(output, seed=0, steps=40)
    return output


@pytest.fixture(scope="session")
def deep_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with each layer twice, all different: four, which two stages of two chunks need."""
    output = tmp_path_factory.mktemp("deep") / "model"
    shutil.copytree(tiny_model, output)
    config = json.loads((output / "config.json").read_text())
    config |= {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    (output / "config.json").write_text(json.dumps(config))
    deep = {}
    for name, tensor in load_file(output / "model.safetensors").items():
        parts = name.split(".")
        if parts[1] != "layers":
            deep[name] = tensor
            continue
        for copy in range(2):
            deep[".".join([*parts[:2], f"{2 * int(parts[2]) + copy}", *parts[3:]])] = tensor * (1 - 0.1 * copy)
    save_file(deep, output / "model.safetensors", metadata={"format": "pt"})
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
        environment["PYTHONFAULTHANDLER"] = "1"  # stacks at the signal below
        for name in PLACE:
            environment.pop(name, None)
        process = subprocess.Popen(
            [*command, str(script), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
            ended = f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"was stopped after {timeout_seconds} s"
            # Every rank says where it stands before it ends; without torchrun they would run on.
            for rank in [*psutil.Process(process.pid).children(recursive=True), process]:
                rank.send_signal(signal.SIGABRT)
            output, _ = process.communicate()
        if process.returncode:
            pytest.fail(f"{script.name} {ended}\n{output[-6000:]}")

    return run
