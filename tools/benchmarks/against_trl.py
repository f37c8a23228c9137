r"""GRPO against TRL's GRPOTrainer and a plain loop: same model, prompts, batch, generations, optimizer and schedule.

python -m tools.benchmarks.against_trl models/tiny-sort [--steps 150] [--seeds 5]

Makes an environment of its own for TRL (--environment), runs TRL, the plain loop of plain_worker.py, and this project
without pruning, with the quickstart's and with the score that its docs advise, one after the other on one thread.
Prints for each the processor seconds a step, and what it had spent when it reached --target, between validations
linearly; of several seeds with 95 % intervals. Validation is not timed. A run kept in --runs is not made again.

A compute-bound model with longer answers, of half as many prompts a step:

python tools/make_tiny_model.py models/sort-30M --size 30M --max-digits 16 --steps 200
python -m tools.benchmarks.against_trl models/sort-30M --target 0.7 \
    --steps 50 --prompts 16 --peak-rate 5e-5 --period 5 --validation 128
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from tools.benchmarks.grpo_task import GENERATIONS, Task, arguments, read_points
from tools.benchmarks.own_run import METHODS, one_thread, train
from tools.benchmarks.study import SEEDS, Interval, Run, all_spent_until, collect, ratio, spent_until

WORKERS = Path(__file__).parent
TRL = "trl==1.16.0"


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


def run_worker(python: Path, worker: str, task: Task, seed: int) -> Run:
    """A worker's run."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "points.json"
        command = [python, WORKERS / worker, *arguments(replace(task, seed=seed), output)]
        subprocess.run(command, check=True, env=one_thread(), stdout=subprocess.DEVNULL)
        return read_points(json.loads(output.read_text()))


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


def run_ours(task: Task, overrides: Sequence[str], seed: int) -> Run:
    """A run of this project."""
    return train([*own_settings(replace(task, seed=seed)), *overrides])


def report(runs: Mapping[str, Sequence[Run]], *, target: float) -> str:
    """One row a trainer; ratios are the first one's figure over the row's, seed by seed."""
    lines = [
        f"| | processor s a step | ratio | to {target}: steps | processor s | ratio | tokens sampled |"
        " tokens trained | accuracy at the end |",
        "|" + "---|" * 9,
    ]
    base = next(iter(runs.values()))
    base_ends, base_reached = [points[-1] for points in base], all_spent_until(base, target)
    for name, seeds in runs.items():
        ends = [points[-1] for points in seeds]
        cells = [
            Interval.of([end.processor_seconds / end.step for end in ends]).text(3),
            ratio(base_ends, ends, "processor_seconds").text(2),
        ]
        reached = [point for points in seeds if (point := spent_until(points, target))]
        if len(reached) < len(seeds):
            cells += [f"never in {len(seeds) - len(reached)} of {len(seeds)}", *[""] * 4]
        else:
            cells += [
                Interval.of([point.step for point in reached]).text(0),
                Interval.of([point.processor_seconds for point in reached]).text(1),
                ratio(base_reached, reached, "processor_seconds").text(2),
                Interval.of([point.sampled_tokens for point in reached]).text(0),
                Interval.of([point.trained_tokens for point in reached]).text(0),
            ]
        cells.append(Interval.of([end.accuracy for end in ends]).text(3))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="made by tools/make_tiny_model.py")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, choices=SEEDS, default=1)
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--runs", type=Path, help="keeps each run's validations (default: results/against_trl/MODEL)")
    parser.add_argument("--environment", type=Path, default=Path(".bench/trl"), help="where TRL is installed")
    parser.add_argument("--prompts", type=int, default=32, help="a step, 8 completions each")
    parser.add_argument("--validation", type=int, default=256, help="held-out problems, four samples each")
    parser.add_argument("--period", type=int, default=25, help="steps between validations")
    parser.add_argument("--peak-rate", type=float, default=1e-3, help="learning rate after the warm-up")
    options = parser.parse_args()
    task = Task(
        model=options.model.resolve(),
        steps=options.steps,
        seed=0,
        prompts=options.prompts,
        validation=options.validation,
        period=options.period,
        peak_rate=options.peak_rate,
    )
    python = environment_with(TRL, options.environment.absolute())
    trainers = {
        "TRL GRPOTrainer": partial(run_worker, python, "trl_worker.py", task),
        "plain loop": partial(run_worker, Path(sys.executable), "plain_worker.py", task),
        "ours, GRPO": partial(run_ours, task, METHODS["grpo"]),
        "ours, DPPO": partial(run_ours, task, METHODS["dppo"]),
        "ours, DPPO surprise": partial(run_ours, task, METHODS["dppo surprise"]),
    }
    kept = options.runs or Path("results/against_trl") / options.model.name
    runs = collect(trainers, settings=asdict(task), seeds=options.seeds, kept=kept)
    print(report(runs, target=options.target))


if __name__ == "__main__":
    main()
