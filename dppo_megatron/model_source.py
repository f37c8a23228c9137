"""Where a policy's weights come from: a directory of Hugging Face's or of ours, or a name on the hub."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer*", "*.model", "LICENSE*", "NOTICE*")
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates",
    "*.jinja",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "LICENSE*",
    "NOTICE*",
)
"""What travels with weights, so that whoever gets them needs nothing else; licences ask for it too."""


def find_model(name: str) -> Path:
    """The local directory of ``policy.model_name``; a name on the hub is fetched into the hub's cache.

    name: a Hugging Face directory; a checkpoint, ``step_N`` or a converted one; a run's directory, which stands for
    its ``hf/``; or a hub name, ``owner/model`` or ``owner/model@revision``.
    Raises ValueError where there is no such directory and nothing to fetch.
    """
    directory = Path(name).expanduser()
    for candidate in (directory, directory / "hf"):
        if (candidate / "config.json").is_file():
            return candidate
    if directory.is_dir():
        raise ValueError(
            f"policy.model_name: {name} is a directory without config.json, neither a Hugging Face model nor a "
            "checkpoint (step_N) nor a run that exported its model (hf/)"
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ValueError(
            f"policy.model_name: there is no directory {name} (looked from {Path.cwd()}); give a local directory "
            "or a hub name such as Qwen/Qwen3-4B or Qwen/Qwen3-4B@revision"
        )
    return _fetch(name)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(_FETCHED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"policy.model_name: {name} is neither a local directory nor to be had from the hub ({reason})"
        ) from error


def read_model_config(directory: Path) -> Mapping[str, Any]:
    """The model's config.json. Raises ValueError where it is missing or is not JSON."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"policy.model_name: {directory} holds no config.json")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"policy.model_name: {path} is not JSON: {error}") from error


def copy_companions(source: Path, target: Path) -> None:
    """Copy the configuration, tokenizer, chat templates, generation settings and licence of a model, as they are."""
    for pattern in _COMPANIONS:
        for path in source.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target / path.name)
