"""``dppo eval``: evaluate a checkpoint or a Hugging Face model."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.commands.failures import EXIT_FAILED, EXIT_USAGE, complain

if TYPE_CHECKING:
    from dppo_megatron.config.loader import LoadedConfig
    from dppo_megatron.plan import Layout


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "eval",
        help="evaluate a checkpoint or a model: pass@k and maj@k",
        description="Evaluate a model on dppo.evaluation.datasets (or data.validation): pass@k and maj@k of "
        "dppo.evaluation.num_generations samples a prompt, with confidence intervals; every sample goes to a JSONL.",
    )
    parser.add_argument("model", metavar="MODEL", help="a run's checkpoint step_N, a Hugging Face directory or name")
    parser.add_argument("config", metavar="CONFIG", help="the configuration of a run, for data, reward and layout")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides in Hydra's grammar")
    parser.add_argument("--temperature", type=float, help="instead of policy.generation.temperature; 0 is greedy")
    parser.add_argument("--output", metavar="DIR", type=Path, help="default: evaluation/ in logger.log_dir")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    from dppo_megatron import launcher
    from dppo_megatron.commands.train import check_run_layout
    from dppo_megatron.config.loader import require_config

    try:
        if options.temperature is not None and options.temperature < 0:
            raise ValueError(f"--temperature: {options.temperature}; allowed: 0 or more")
        loaded = require_config(options.config, options.overrides)
        layout = check_run_layout(loaded)
        if not launcher.is_joined(os.environ) and layout.world_size > 1:
            return launcher.start_processes(arguments, layout=layout, num_nodes=loaded.config.cluster.num_nodes)
        launcher.adopt_slurm_variables()
        return _evaluate(options, loaded, layout)
    except ValueError as error:
        return complain(error, EXIT_USAGE)
    except RuntimeError as error:
        return complain(error, EXIT_FAILED)


def _evaluate(options: argparse.Namespace, loaded: "LoadedConfig", layout: "Layout") -> int:
    from dppo_megatron.checkpoint_evaluation import figures_text, run_evaluation

    output = options.output or Path(loaded.config.logger.log_dir) / "evaluation"
    found = run_evaluation(loaded, layout, model=options.model, temperature=options.temperature, output=output)
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"{figures_text(found)}{output}\n")
    return 0
