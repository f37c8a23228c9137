"""Where a policy's weights come from: a local Hugging Face directory, or a name on the hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer*", "*.model")


def find_model(name: str) -> Path:
    """The local directory of ``policy.model_name``; a name on the hub is fetched into the hub's cache.

    Raises ValueError where there is no such directory and nothing to fetch.
    """
    directory = Path(name).expanduser()
    if (directory / "config.json").is_file():
        return directory
    if directory.is_dir():
        raise ValueError(f"policy.model_name: {name} is a directory without config.json, not a Hugging Face model")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"policy.model_name: there is no directory {name} (looked from {Path.cwd()}); give a local Hugging Face "
            "directory or a hub name such as Qwen/Qwen3-4B"
        )
    return _fetch(name)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"policy.model_name: {name} is neither a local directory nor to be had from the hub ({reason})"
        ) from error


def read_model_config(directory: Path) -> Mapping[str, Any]:
    """The model's config.json. Raises ValueError where it is not JSON."""
    try:
        return json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"policy.model_name: {directory / 'config.json'} is not JSON: {error}") from error
