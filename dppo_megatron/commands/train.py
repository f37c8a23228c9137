"""``dppo train``: train a policy as a configuration says."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.commands.failures import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, complain

if TYPE_CHECKING:
    from dppo_megatron.config.loader import LoadedConfig
    from dppo_megatron.plan import Layout
    from dppo_megatron.stop_request import Stopped


def add_parser(commands: Any) -> None:
    """Add the command to the parser's subcommands."""
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
    train.add_argument("--strict", action="store_true", help="take warnings of ignored keys as errors")


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    from dppo_megatron import launcher
    from dppo_megatron.config.loader import require_config

    try:
        loaded = require_config(options.config, options.overrides, strict=options.strict)
        layout = check_run_layout(loaded)
        if not launcher.is_joined(os.environ):
            _check_directories(loaded, fresh=options.fresh)
            if layout.world_size > 1:
                return launcher.start_processes(arguments, layout=layout, num_nodes=loaded.config.cluster.num_nodes)
        launcher.adopt_slurm_variables()
    except ValueError as error:
        return complain(error, EXIT_USAGE)
    return _train(loaded, layout, arguments)


def check_run_layout(loaded: "LoadedConfig") -> "Layout":
    """The layout, checked against the model before a process is started."""
    from dppo_megatron.architecture import read_architecture
    from dppo_megatron.model_source import find_model, read_model_config
    from dppo_megatron.plan import check_layout, resolve_layout

    config = loaded.config
    megatron, virtual_pp = config.policy.megatron_cfg, config.dppo.virtual_pipeline_stages
    layout = resolve_layout(config.cluster, megatron=megatron, virtual_pp=virtual_pp)
    architecture = read_architecture(read_model_config(find_model(config.policy.model_name)))
    check_layout(architecture, layout=layout, megatron=megatron)
    return layout


def _check_directories(loaded: "LoadedConfig", *, fresh: bool) -> None:
    for key, name in (
        ("logger.log_dir", loaded.config.logger.log_dir),
        ("checkpointing.checkpoint_dir", loaded.config.checkpointing.checkpoint_dir),
    ):
        if fresh and Path(name).is_dir() and any(Path(name).iterdir()):
            raise ValueError(f"--fresh: {key} = {name} is not empty")


def _train(loaded: "LoadedConfig", layout: "Layout", arguments: Sequence[str]) -> int:
    from dppo_megatron.config.duration import parse_duration
    from dppo_megatron.stop_request import Stopped, StopRequest

    limit = loaded.config.checkpointing.checkpoint_must_save_by
    try:
        with StopRequest(must_save_by_seconds=None if limit is None else parse_duration(limit)) as stop:
            from dppo_megatron.train import run_training  # takes seconds: a signal meanwhile counts

            run_training(loaded, layout, command=["dppo", *arguments], stop=stop)
    except Stopped as stopped:
        return _say_stopped(stopped)
    except ValueError as error:
        return complain(error, EXIT_USAGE)
    except RuntimeError as error:
        logging.getLogger(__name__).debug("", exc_info=True)
        return complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return complain("interrupted", EXIT_INTERRUPTED)
    return 0


def _say_stopped(stopped: "Stopped") -> int:
    from dppo_megatron.stop_request import EXIT_RESUME

    done = f"stopped by {stopped.reason} after step {stopped.num_steps_done}"
    if stopped.checkpoint is None:
        return complain(f"{done}; it is not saved (checkpointing.enabled is false, or the disk refused)", EXIT_FAILED)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"dppo: {done}; the same command goes on from there (exit code {EXIT_RESUME})\n")
    return EXIT_RESUME
