"""``dppo compare``: runs against each other."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dppo_megatron.commands.failures import EXIT_USAGE, complain


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "compare",
        help="compare runs: curves, cost to an accuracy, settings",
        description="Compare runs: totals, what each needed to reach an accuracy with ratios to the first run, and "
        "the settings in which they differ; with --output also curves over steps, tokens and seconds as one "
        "HTML file.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="directories of runs, the baseline first")
    parser.add_argument(
        "--target", metavar="ACCURACY", type=float, help="0 to 1; default: the highest that all runs reached"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write an HTML page too")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    from dppo_megatron.atomic_file import atomic_write_text
    from dppo_megatron.report.compare_report import comparison_page, comparison_text
    from dppo_megatron.report.comparison import compare
    from dppo_megatron.report.run_data import read_run

    try:
        comparison = compare([read_run(directory) for directory in options.runs], target=options.target)
    except ValueError as error:
        return complain(error, EXIT_USAGE)
    sys.stdout.write(comparison_text(comparison))
    if options.output is not None:
        atomic_write_text(options.output, comparison_page(comparison))
        sys.stdout.write(f"\n{options.output}\n")
    return 0
