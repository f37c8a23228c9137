"""Metrics to Weights & Biases, one run there for all starts of a run here."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dppo_megatron.atomic_file import atomic_write_text
from dppo_megatron.config.logger_section import WandbConfig

ID_FILE = "wandb_id.txt"


def keep_id(directory: Path, *, resumed: str | None) -> str:
    """The id of the run there: the checkpoint's, or that in the run's directory, or a new one; then kept there.

    resumed: what the checkpoint that the run continues from says; a run that died before its first has none.
    """
    path = directory / ID_FILE
    kept = path.read_text(encoding="utf-8") if path.is_file() else None
    chosen = resumed or kept or secrets.token_hex(4)
    if chosen != kept:
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, chosen)
    return chosen


class WandbSink:
    """A run there, by its id: a resumed run continues it.

    WANDB_MODE=offline writes below the run's directory and sends nothing.
    """

    def __init__(self, directory: Path, config: WandbConfig, *, run_id: str) -> None:
        """Open or continue the run. Raises ValueError where the package is not installed."""
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError("logger.wandb_enabled: true needs the package wandb: pip install wandb") from error
        self._run: Any = wandb.init(
            project=config.project,
            name=config.name or directory.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(directory),
        )

    def log(self, metrics: Mapping[str, float], *, steps_done: int) -> None:
        """Log values by name."""
        self._run.log(dict(metrics), step=steps_done)

    def close(self) -> None:
        """Finish this start's part of the run."""
        self._run.finish()
