"""``dppo report``: the HTML report of a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dppo_megatron.commands.failures import EXIT_USAGE, complain


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "report",
        help="write a run's report as one HTML file",
        description="Write a run's report as one HTML file that needs no network. A run writes it at its end; "
        "this writes it anew, also while the run goes on.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's directory (logger.log_dir)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="where to write; default: RUN/report.html")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    from dppo_megatron.report.run_report import write_report

    try:
        path = write_report(options.run, output=options.output)
    except ValueError as error:
        return complain(error, EXIT_USAGE)
    sys.stdout.write(f"{path}\n")
    return 0
