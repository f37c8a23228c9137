"""``dppo show``: a step's samples in the terminal."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dppo_megatron.commands.failures import EXIT_USAGE, complain


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "show",
        help="print a step's samples, best and worst first",
        description="Print samples that a run recorded (dppo.rollout.record_dir): the best and the worst completions "
        "of a step, with reward, advantage, what pruning decided and the weight.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's directory (logger.log_dir)")
    parser.add_argument("--step", type=int, help="steps done, as the console counts; default: the last recorded")
    parser.add_argument("--count", type=int, default=3, help="completions from either end (default 3)")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    from dppo_megatron.report.run_data import read_run
    from dppo_megatron.report.sample_text import samples_text

    try:
        text = samples_text(read_run(options.run), step=options.step, count=options.count)
    except ValueError as error:
        return complain(error, EXIT_USAGE)
    sys.stdout.write(text)
    return 0
