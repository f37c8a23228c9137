"""The sizes of a model without the network: its local directory, the hub's cache, or a table of public models."""

import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any


def known_config(name: str) -> tuple[Mapping[str, Any], str] | None:
    """A model's config.json and where it was found, or None; ``name`` is a directory or a name on the hub.

    Raises: ValueError where the file that is there is not JSON.
    """
    for path in (Path(name).expanduser() / "config.json", *_cached(name)):
        if path.is_file():
            try:
                return json.loads(path.read_text(encoding="utf-8")), str(path)
            except json.JSONDecodeError as error:
                raise ValueError(f"policy.model_name: {path} is not JSON: {error}") from error
    table = json.loads(files("dppo_megatron").joinpath("known_models.json").read_text(encoding="utf-8"))
    return (table[name], "the table of public models") if name in table else None


def _cached(name: str) -> list[Path]:
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub"
    folder = Path(hub).expanduser() / ("models--" + name.replace("/", "--")) / "snapshots"
    return sorted(folder.glob("*/config.json")) if folder.is_dir() else []
