"""The command line: a thin dispatcher; each command is a module of ``dppo_megatron.commands``."""

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from dppo_megatron import __version__
from dppo_megatron.commands.failures import EXIT_FAILED, complain

COMMANDS = ("train", "plan", "config", "eval", "report", "compare", "show", "doctor")
"""Modules of ``dppo_megatron.commands``, in the order of --help; a new command is a module and a name here."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit code 2 for what the user has to mend before the run starts, 1 for a run that failed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(arguments)
    _set_up_messages()
    try:
        code = import_module(f"dppo_megatron.commands.{options.command}").run(options, arguments)
    except BrokenPipeError:  # the reader of the output has gone: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it ends
        code = 128 + signal.SIGPIPE
    except OSError as error:  # a disk that is full or lost, a place that may not be written
        code = complain(
            f"a file could not be read or written: {error}; see that the directories which the command names "
            "(logger.log_dir, checkpointing.checkpoint_dir, --output) are there, can be written and have room",
            EXIT_FAILED,
        )
    sys.exit(code)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse takes no second helping of overrides behind an option between them.
    if rest and (not hasattr(options, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _set_up_messages() -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    # megatron-core warns at every start of what is absent (Transformer Engine, apex): the layer spec decides that.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dppo",
        description="GRPO post-training on megatron-core with unbiased dynamic pruning and dense packing.",
    )
    parser.add_argument("--version", action="version", version=f"dppo_megatron {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"dppo_megatron.commands.{name}").add_parser(commands)
    return parser
