"""``dppo plan``: what a configuration comes to, in seconds and without a GPU."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from dppo_megatron.commands.failures import EXIT_USAGE, complain


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    plan = commands.add_parser(
        "plan",
        help="say what a configuration comes to: layout, batches, padding, savings, memory, launch",
        description="Say what a configuration comes to, without a GPU and without the network.",
    )
    plan.add_argument("config", metavar="CONFIG")
    plan.add_argument("overrides", metavar="KEY=VALUE", nargs="*")
    plan.add_argument("--json", action="store_true", help="JSON in place of text")
    plan.add_argument("--strict", action="store_true", help="take warnings as errors")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    from dppo_megatron.plan_text import plan_json, plan_text
    from dppo_megatron.run_plan import examine_run, make_plan

    found = examine_run(options.config, options.overrides)
    errors = found.errors + (found.warnings if options.strict else ())
    if errors:
        return complain("\n".join(map(str, errors)), EXIT_USAGE)
    plan = make_plan(found, path=options.config, overrides=options.overrides)
    sys.stdout.write((json.dumps(plan_json(plan), indent=2) if options.json else plan_text(plan)) + "\n")
    return 0
