"""The quickstart against TRL's GRPOTrainer: same model, prompts, batch, generations, optimizer and schedule.

python tools/benchmarks/against_trl.py models/tiny-sort [--steps 150]

Makes an environment of its own for TRL (--environment), runs TRL, this project without and with pruning one after
the other, one thread each, and prints for each the training seconds and processor seconds a step, and what it had
spent at the first validation of at least --target. Validation is outside of all times.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("trl_worker.py")
TRL = "trl==1.16.0"


@dataclass(frozen=True, slots=True)
class Point:
    """A validation and what was spent until then. tokens: completion tokens sampled, and trained on."""

    step: int
    accuracy: float
    seconds: float
    processor_seconds: float
    sampled_tokens: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class Contender:
    """One trainer's validations; the last one's ``spent`` is the whole run's."""

    name: str
    points: tuple[Point, ...]

    def reached(self, target: float) -> Point | None:
        """The first validation at or above the target."""
        return next((point for point in self.points if point.accuracy >= target), None)


def environment_with(package: str, directory: Path) -> Path:
    """An interpreter that has a package beside what this one has; made once."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        shared = directory / "lib" / version / "site-packages" / "shared.pth"
        shared.write_text(sysconfig.get_paths()["purelib"] + "\n")
    if subprocess.run([python, "-c", "import trl"], capture_output=True, check=False).returncode:
        subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
    return python


def run_trl(python: Path, model: Path, *, steps: int, seed: int) -> Contender:
    """TRL's run in its environment."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "points.json"
        command = [python, WORKER, model, output, "--steps", str(steps), "--seed", str(seed)]
        subprocess.run(command, check=True, env=_one_thread(), stdout=subprocess.DEVNULL)
        points = tuple(Point(**point) for point in json.loads(output.read_text()))
    return Contender("TRL GRPOTrainer", points)


def run_ours(name: str, model: Path, *, steps: int, seed: int, overrides: tuple[str, ...]) -> Contender:
    """A run of the quickstart, as a user starts it."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        command = [sys.executable, "-m", "dppo_megatron", "train", REPOSITORY / "examples" / "quickstart.yaml"]
        command += [f"policy.model_name={model}", f"logger.log_dir={run}", f"grpo.max_num_steps={steps}"]
        command += [f"policy.megatron_cfg.scheduler.lr_decay_iters={steps}", f"grpo.seed={seed}"]
        command += [
            "checkpointing.enabled=false",
            "dppo.save_hf=false",
            "logger.tensorboard_enabled=false",
            *overrides,
        ]
        before = os.times().children_user + os.times().children_system
        subprocess.run(command, check=True, env=_one_thread(), stdout=subprocess.DEVNULL)
        spent = os.times().children_user + os.times().children_system - before
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Processor time is known for the whole process only; start-up is counted against us.
    total = sum(line["timing/train/total_step_time"] for line in lines)
    points, seconds, sampled, trained = [], 0.0, 0, 0
    for line in lines:
        outside = line["timing/validation/total_validation_time"] + line["timing/train/checkpointing"]
        seconds += line["timing/train/total_step_time"] - outside
        sampled += line["dppo/rollout_tokens"]
        trained += line["train/global_valid_toks"]
        accuracy = line.get("validation/accuracy")
        if accuracy is not None:
            share = spent * seconds / total
            points.append(Point(line["step"] + 1, accuracy, seconds, share, sampled, trained))
    return Contender(name, tuple(points))


def _one_thread() -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def print_table(contenders: list[Contender], *, target: float) -> None:
    """One row a trainer; ratios are TRL's figure over the row's."""
    print(f"{'':24}{'s/step':>9}{'cpu s/step':>12}{'ratio':>8}{'accuracy':>10}", end="")
    print(f"{f'to {target:.2f}: steps':>16}{'s':>8}{'cpu s':>8}{'ratio':>8}{'sampled':>10}{'trained':>10}")
    first, first_reached = contenders[0].points[-1], contenders[0].reached(target)
    for contender in contenders:
        last, reached = contender.points[-1], contender.reached(target)
        cpu = last.processor_seconds / last.step
        ratio = first.processor_seconds / first.step / cpu
        print(f"{contender.name:24}{last.seconds / last.step:9.3f}{cpu:12.3f}{ratio:7.2f}x", end="")
        print(f"{last.accuracy:10.3f}", end="")
        if reached is None:
            print(f"{'never':>16}")
            continue
        against = first_reached.processor_seconds / reached.processor_seconds if first_reached else float("nan")
        print(f"{reached.step:16}{reached.seconds:8.1f}{reached.processor_seconds:8.1f}{against:7.2f}x", end="")
        print(f"{reached.sampled_tokens:10,}{reached.trained_tokens:10,}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="made by tools/make_tiny_model.py")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--environment", type=Path, default=Path(".bench/trl"), help="where TRL is installed")
    options = parser.parse_args()
    model, python = options.model.resolve(), environment_with(TRL, options.environment.absolute())
    runs = {"steps": options.steps, "seed": options.seed}
    contenders = [run_trl(python, model, **runs)]
    contenders.append(run_ours("ours, GRPO", model, **runs, overrides=("dppo.enabled=false",)))
    contenders.append(run_ours("ours, DPPO", model, **runs, overrides=()))
    print_table(contenders, target=options.target)


if __name__ == "__main__":
    main()
