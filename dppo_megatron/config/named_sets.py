"""Public data sets by the names that recipes give them, and where their prepared rows lie.

``tools/prepare_data.py`` turns each into JSONL; nothing here reads the network.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

DIRECTORY_VARIABLE = "DPPO_DATA_DIR"
"""The environment variable that names the directory of prepared sets; without it they are in ``data``."""

# By NeMo-RL's name, then by split (None: where the file names none): the name that prepare_data.py knows.
# Source of names and splits: NeMo-RL, nemo_rl.data.datasets.response_datasets.
NAMED_SETS: Mapping[str, Mapping[str | None, str]] = {
    "OpenMathInstruct-2": {None: "openmathinstruct-2", "train_1M": "openmathinstruct-2"},
    "DAPOMath17K": {None: "dapo-math-17k-verbatim"},
    "DAPOMathAIME2024": {None: "dapo-aime24-verbatim"},
    "DeepScaler": {None: "deepscaler"},
    "AIME2024": {None: "aime24"},
    "gsm8k": {None: "gsm8k", "train": "gsm8k", "test": "gsm8k-test"},
    "math": {None: "math"},
    "dapo-math-17k": {None: "dapo-math-17k"},
    "math-500": {None: "math-500"},
    "aime25": {None: "aime25"},
    "amc": {None: "amc"},
    "minerva": {None: "minerva"},
    "olympiadbench": {None: "olympiadbench"},
}

_OWN_FILE = (None, "ResponseDataset")

# Key within the data set's block, value, what is wrong, what to write instead.
_Refusal = tuple[str, object, str, str]


def prepared_file(name: str, split: str | None) -> Path | None:
    """The JSONL file of a named set, or None where the name or the split is not one that is known."""
    prepared = NAMED_SETS.get(name, {}).get(split)
    return Path(os.environ.get(DIRECTORY_VARIABLE, "data")) / f"{prepared}.jsonl" if prepared else None


def prepare_command(name: str, split: str | None) -> str:
    """The command that writes a known set's file; it needs the hub, or a copy of the set with ``--source``."""
    return f"python tools/prepare_data.py {NAMED_SETS[name][split]} {prepared_file(name, split)}"


def what_is_missing(path: str, *, name: str | None, split: str | None) -> str:
    """What to tell of a data set whose file is not there."""
    if name is not None and prepared_file(name, split) == Path(path):
        return f"{name} is read from {path}, which is not in {Path.cwd()}; {prepare_command(name, split)}"
    return f"data_path is {path!r}; there is no such file in {Path.cwd()}"


def locate(block: dict[str, Any]) -> Iterator[_Refusal]:
    """Write the file of the set that a block names into its ``data_path``; yields what cannot be used."""
    name, split, path = block.get("dataset_name"), block.get("split"), block.get("data_path")
    if name in _OWN_FILE or not isinstance(name, str):
        return
    if name not in NAMED_SETS:
        others = f"use {', '.join(NAMED_SETS)}, or dataset_name: ResponseDataset and data_path: FILE.jsonl"
        yield "dataset_name", name, "not a set that can be prepared", others
        return
    if split is not None and not isinstance(split, str):
        return
    file = prepared_file(name, split)
    if file is None:
        splits = ", ".join(part for part in NAMED_SETS[name] if part)
        yield "split", split, f"not a part of {name} that can be prepared", f"use {splits or 'null'}"
    elif path is None:
        block["data_path"] = str(file)
    elif path != str(file):
        yield "data_path", path, f"dataset_name = {name} has rows of its own", f"leave it out, or put {file} there"
