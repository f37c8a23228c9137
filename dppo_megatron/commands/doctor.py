"""``dppo doctor``: say whether this machine, or this job, can train."""

import argparse
from collections.abc import Sequence
from typing import Any

from dppo_megatron import doctor


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    doctor.add_arguments(commands.add_parser("doctor", help="say whether this machine, or this job, can train"))


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    return doctor.run(options)
