"""Where each value of a run's configuration came from, kept beside the configuration."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dppo_megatron.atomic_file import atomic_write_text
from dppo_megatron.config.loader import LoadedConfig
from dppo_megatron.provenance import CONFIG_FILE

ORIGINS_FILE = "config_origins.json"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of a configuration. origin: ``file:line``, ``override text`` or ``default``; empty: not recorded."""

    key: str
    value: str
    origin: str


def write_origins(directory: Path, loaded: LoadedConfig) -> None:
    """Write config_origins.json: the origin of every dotted key that is not at its default."""
    origins = {key: loaded.where(key) for key, _ in _leaves(loaded.effective, "")}
    kept = {key: origin for key, origin in origins.items() if origin != DEFAULT}
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write_text(directory / ORIGINS_FILE, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def read_settings(directory: Path) -> tuple[Setting, ...]:
    """The run's configuration, key by key, in the file's order; empty where the run has not written it yet."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return ()
    tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    origins_path = directory / ORIGINS_FILE
    origins, fallback = {}, ""
    if origins_path.is_file():
        origins, fallback = json.loads(origins_path.read_text(encoding="utf-8")), DEFAULT
    return tuple(
        Setting(key, value if isinstance(value, str) else json.dumps(value), origins.get(key, fallback))
        for key, value in _leaves(tree, "")
    )


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item
