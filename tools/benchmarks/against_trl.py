"""GRPO against TRL's GRPOTrainer and a plain loop: same model, prompts, batch, generations, optimizer and schedule.

python -m tools.benchmarks.against_trl models/tiny-sort [--steps 150]

Makes an environment of its own for TRL (--environment), runs TRL, the plain loop of plain_worker.py, and this project
without pruning, with the quickstart's and with the score that its docs advise, one after the other on one thread.
Prints for each the training seconds and processor seconds a step, and what it had spent at the first validation of at
least --target. Validation is not timed.

A compute-bound model with longer answers, of half as many prompts a step:

python tools/make_tiny_model.py models/sort-30M --size 30M --max-digits 16 --steps 200
python -m tools.benchmarks.against_trl models/sort-30M --steps 50 --prompts 16 --peak-rate 5e-5 --period 5
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.benchmarks.grpo_task import GENERATIONS, Point, Task, arguments, read_points
from tools.benchmarks.own_run import one_thread, train

WORKERS = Path(__file__).parent
TRL = "trl==1.16.0"
SURPRISE = ("dppo.completion_pruning.policy=neyman", "dppo.completion_pruning.score=surprise")


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


def run_worker(name: str, python: Path, worker: str, task: Task) -> Contender:
    """A worker's run."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "points.json"
        command = [python, WORKERS / worker, *arguments(task, output)]
        subprocess.run(command, check=True, env=one_thread(), stdout=subprocess.DEVNULL)
        return Contender(name, read_points(json.loads(output.read_text())))


def own_settings(task: Task) -> list[str]:
    """The task as overrides of the quickstart."""
    values = {
        "policy.model_name": task.model,
        "policy.max_total_sequence_length": task.longest_prompt + task.new_tokens,
        "policy.generation.max_new_tokens": task.new_tokens,
        "policy.train_global_batch_size": task.prompts * GENERATIONS,
        "policy.megatron_cfg.optimizer.lr": task.peak_rate,
        "policy.megatron_cfg.scheduler.lr_warmup_init": 0.3 * task.peak_rate,
        "policy.megatron_cfg.scheduler.lr_decay_iters": task.steps,
        "grpo.seed": task.seed,
        "grpo.max_num_steps": task.steps,
        "grpo.num_prompts_per_step": task.prompts,
        "grpo.max_val_samples": task.validation,
        "grpo.val_period": task.period,
    }
    return [f"{key}={value}" for key, value in values.items()]


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
    parser.add_argument("--prompts", type=int, default=32, help="a step, 8 completions each")
    parser.add_argument("--validation", type=int, default=256, help="held-out problems, four samples each")
    parser.add_argument("--period", type=int, default=25, help="steps between validations")
    parser.add_argument("--peak-rate", type=float, default=1e-3, help="learning rate after the warm-up")
    options = parser.parse_args()
    task = Task(
        model=options.model.resolve(),
        steps=options.steps,
        seed=options.seed,
        prompts=options.prompts,
        validation=options.validation,
        period=options.period,
        peak_rate=options.peak_rate,
    )
    python = environment_with(TRL, options.environment.absolute())
    contenders = [
        run_worker("TRL GRPOTrainer", python, "trl_worker.py", task),
        run_worker("plain loop", Path(sys.executable), "plain_worker.py", task),
        Contender("ours, GRPO", train([*own_settings(task), "dppo.enabled=false"])),
        Contender("ours, DPPO", train(own_settings(task))),
        Contender("ours, DPPO surprise", train([*own_settings(task), *SURPRISE])),
    ]
    print_table(contenders, target=options.target)


if __name__ == "__main__":
    main()
