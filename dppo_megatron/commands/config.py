"""``dppo config``: what a file resolves to, what is wrong with it, and what is known of each key."""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from dppo_megatron.commands.failures import EXIT_USAGE, complain

if TYPE_CHECKING:
    from dppo_megatron.config.problem import Problem


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
    config = commands.add_parser("config", help="resolve or check a configuration, or explain its keys")
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    resolve = actions.add_parser("resolve", help="print what the file, its defaults and the overrides come to")
    check = actions.add_parser("check", help="say of every key that cannot be used why, and what to write instead")
    for parser in (resolve, check):
        parser.add_argument("config", metavar="CONFIG")
        parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*")
        parser.add_argument("--json", action="store_true", help="JSON in place of text")
    check.add_argument("--strict", action="store_true", help="take warnings of ignored keys as errors")
    keys = actions.add_parser("keys", help="print what is known of keys: class, default, meaning")
    keys.add_argument("pattern", metavar="PATTERN", nargs="?", default="*", help="part of a key, or with *: grpo.*")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    if options.action == "keys":
        return _keys(options.pattern)
    return _resolve(options) if options.action == "resolve" else _check(options)


def _resolve(options: argparse.Namespace) -> int:
    import yaml

    from dppo_megatron.config.loader import load_container

    try:
        container = load_container(options.config, options.overrides)
    except ValueError as error:
        return complain(error, EXIT_USAGE)
    if options.json:
        text = json.dumps(container, indent=2, ensure_ascii=False)
    else:
        text = yaml.safe_dump(container, sort_keys=False, allow_unicode=True).rstrip()
    sys.stdout.write(text + "\n")
    return 0


def _check(options: argparse.Namespace) -> int:
    from dppo_megatron.run_plan import examine_run

    found = examine_run(options.config, options.overrides)
    errors, warnings = found.errors, found.warnings
    if options.strict:
        errors, warnings = (*errors, *warnings), ()
    if options.json:
        entries = {"accepted": not errors, "errors": entries_of(errors), "warnings": entries_of(warnings)}
        sys.stdout.write(json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
    else:
        lines = [f"error: {problem}" for problem in errors] + [f"warning: {problem}" for problem in warnings]
        verdict = f"rejected: {len(errors)} errors" if errors else "accepted"
        sys.stdout.write("\n".join([*lines, f"{verdict}, {len(warnings)} warnings"]) + "\n")
    return EXIT_USAGE if errors else 0


def entries_of(problems: "Iterable[Problem]") -> list[dict[str, object]]:
    """Problems as JSON has them."""
    return [
        {
            "key": problem.key,
            "value": problem.value,
            "file": problem.place.file,
            "line": problem.place.line,
            "reason": problem.reason,
            "alternative": problem.alternative,
        }
        for problem in problems
    ]


def _keys(pattern: str) -> int:
    from dppo_megatron.config.registry import class_of, default_of, nearest_key, registry

    wanted = pattern if "*" in pattern else f"*{pattern}*"
    rows = [row for key, row in sorted(registry().items()) if fnmatchcase(key, wanted)]
    if not rows:
        nearest = nearest_key(pattern)
        return complain(f"no key matches {pattern}" + (f"; did you mean {nearest}?" if nearest else ""), EXIT_USAGE)
    for row in rows:
        default = default_of(row.key)
        name = "default" if class_of(row) == "honoured" else "allowed"
        known = f", {name} {default}" if default and class_of(row) != "inert" else ""
        why = f" ({row.reason}; {row.alternative})" if row.reason else ""
        sys.stdout.write(f"{row.key}: {class_of(row)}{known}: {row.meaning}{why}\n")
    return 0
