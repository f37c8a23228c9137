"""How long a user waits: help, the resolved configuration, the plan, the first step of the quickstart.

python -m tools.benchmarks.start_up models/tiny-sort

Wall and processor seconds of the whole process, of the first step until it is logged; medians of three starts.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.benchmarks.timing import spent_at_lines

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def spent(arguments: list[str], *, turns: int = 3) -> tuple[float, float]:
    """Median wall and processor seconds of ``dppo ARGUMENTS``."""
    walls, processors = [], []
    for _ in range(turns):
        before, start = os.times(), time.perf_counter()
        command = [sys.executable, "-m", "dppo_megatron", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = os.times()
        walls.append(time.perf_counter() - start)
        children = (after.children_user + after.children_system, before.children_user + before.children_system)
        processors.append(children[0] - children[1])
    return statistics.median(walls), statistics.median(processors)


def first_step(arguments: list[str], run: Path, *, turns: int = 3) -> tuple[float, float]:
    """Median wall and processor seconds until ``dppo ARGUMENTS`` has logged a step; each turn begins anew."""
    turned = []
    for _ in range(turns):
        shutil.rmtree(run)
        log = run / "metrics.jsonl"
        turned.append(spent_at_lines([sys.executable, "-m", "dppo_megatron", *arguments], log)[1])
    walls, processors = zip(*turned, strict=True)
    return statistics.median(walls), statistics.median(processors)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    model = f"policy.model_name={parser.parse_args().model.resolve()}"
    with tempfile.TemporaryDirectory() as scratch:
        run = f"{scratch}/run"
        Path(run).mkdir()
        small = [f"logger.log_dir={run}", "grpo.max_num_steps=1", "checkpointing.enabled=false", "dppo.save_hf=false"]
        small += ["grpo.val_at_start=false", "grpo.val_at_end=false", "logger.tensorboard_enabled=false"]
        commands = {
            "dppo --help": ["--help"],
            "dppo config resolve": ["config", "resolve", str(QUICKSTART), model],
            "dppo plan": ["plan", str(QUICKSTART), model],
        }
        times = {name: spent(arguments) for name, arguments in commands.items()}
        times["the first step's end"] = first_step(["train", str(QUICKSTART), model, *small], Path(run))
    for name, (wall, processor) in times.items():
        print(f"{name:26}{wall:7.2f} s wall{processor:7.2f} s processor")


if __name__ == "__main__":
    main()
