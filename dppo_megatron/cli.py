"""The command line. Everything heavy is imported by the command that needs it."""

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dppo_megatron import __version__

if TYPE_CHECKING:
    from dppo_megatron.config.loader import LoadedConfig
    from dppo_megatron.plan import Layout

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; exit code 2 for what the user has to mend before the run starts, 1 for a run that failed."""
    options, arguments = _parser(), list(sys.argv[1:] if arguments is None else arguments)
    parsed = options.parse_args(arguments)
    _set_up_messages()
    sys.exit(_train(parsed, arguments))


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
    train = commands.add_parser(
        "train",
        help="train a policy as a configuration says",
        description="Train a policy as a configuration says. Alone it starts the processes that the layout needs "
        "on this machine (cluster.gpus_per_node); under torchrun or srun it joins. A run whose "
        "checkpointing.checkpoint_dir holds a checkpoint continues from it.",
    )
    train.add_argument("config", metavar="CONFIG", help="YAML in NeMo-RL's schema, with a dppo: block")
    train.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", help="overrides in Hydra's grammar, e.g. grpo.max_num_steps=10"
    )
    train.add_argument("--fresh", action="store_true", help="refuse to continue: demand an empty run directory")
    return parser


def _train(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from dppo_megatron import launcher
    from dppo_megatron.config.loader import load_config
    from dppo_megatron.config.rules import check_config

    try:
        loaded = load_config(options.config, options.overrides)
        check_config(loaded.config)
        layout = _layout(loaded)
        if not launcher.is_joined(os.environ):
            _check_directories(loaded, fresh=options.fresh)
            if layout.world_size > 1:
                return launcher.start_processes(arguments, layout=layout, num_nodes=loaded.config.cluster.num_nodes)
        launcher.adopt_slurm_variables()
    except ValueError as error:
        return _complain(error, EXIT_USAGE)
    return _run(loaded, layout, arguments)


def _layout(loaded: "LoadedConfig") -> "Layout":
    """The layout, checked against the model before a process is started."""
    from dppo_megatron.architecture import read_architecture
    from dppo_megatron.model_source import find_model, read_model_config
    from dppo_megatron.plan import check_layout, resolve_layout

    megatron = loaded.config.policy.megatron_cfg
    layout = resolve_layout(loaded.config.cluster, megatron=megatron)
    architecture = read_architecture(read_model_config(find_model(loaded.config.policy.model_name)))
    check_layout(architecture, layout=layout, megatron=megatron)
    return layout


def _check_directories(loaded: "LoadedConfig", *, fresh: bool) -> None:
    for key, name in (
        ("logger.log_dir", loaded.config.logger.log_dir),
        ("checkpointing.checkpoint_dir", loaded.config.checkpointing.checkpoint_dir),
    ):
        if fresh and Path(name).is_dir() and any(Path(name).iterdir()):
            raise ValueError(f"--fresh: {key} = {name} is not empty")


def _run(loaded: "LoadedConfig", layout: "Layout", arguments: Sequence[str]) -> int:
    from dppo_megatron.train import run_training

    try:
        run_training(loaded, layout, command=["dppo", *arguments])
    except ValueError as error:
        return _complain(error, EXIT_USAGE)
    except RuntimeError as error:
        logging.getLogger(__name__).debug("", exc_info=True)
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)
    return 0


def _complain(error: Exception | str, code: int) -> int:
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # What every rank finds wrong, rank 0 says; the launcher ends this process meanwhile.
        time.sleep(3)
    where = f" (rank {rank})" if rank != "0" else ""
    sys.stderr.write(f"dppo: error{where}: {error}\n")
    return code
