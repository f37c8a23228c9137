"""Every key that NeMo-RL's GRPO files know, and ours: what becomes of it here.

The table is ``registry.tsv``. A key that the schema holds is honoured, whatever else: the table gives its
meaning. The others are inert (no value changes anything here), ignored (a warning, unless at an inert value) or
rejected (an error, unless at an inert value).
"""

import csv
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

from dppo_megatron.config.sections import schema_defaults, schema_leaves, schema_sections, select

KeyClass = Literal["honoured", "inert", "ignored", "rejected"]


@dataclass(frozen=True, slots=True)
class RegistryRow:
    """One key of the table.

    key: dotted; ``x.*`` stands for all that is below x. inert: values that change nothing; ``${key}`` stands
    for that key's own value. reason: why it is ignored or rejected. alternative: what to write instead.
    """

    key: str
    kind: KeyClass
    inert: tuple[Any, ...]
    meaning: str
    reason: str
    alternative: str

    def is_inert(self, value: Any, *, tree: dict[str, Any]) -> bool:
        """Whether the value changes nothing, in a resolved configuration ``tree``."""
        return self.kind == "inert" or any(_same(value, _followed(one, tree)) for one in self.inert)


def _followed(value: Any, tree: dict[str, Any]) -> Any:
    follows = isinstance(value, str) and value.startswith("${")
    return select(tree, value[2:-1]) if follows else value


def _same(one: Any, other: Any) -> bool:
    # In Python True is 1, and in YAML it is not.
    return one == other and isinstance(one, bool) == isinstance(other, bool)


@functools.cache
def registry() -> dict[str, RegistryRow]:
    """The table, by key."""
    text = files("dppo_megatron.config").joinpath("registry.tsv").read_text(encoding="utf-8")
    rows = {}
    for row in csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE):
        key, kind = row["key"], row["class"]
        assert kind in get_args(KeyClass), key
        assert key not in rows, key
        inert = tuple(json.loads(row["inert"])) if row["inert"] else ()
        rows[key] = RegistryRow(key, kind, inert, row["meaning"], row["reason"], row["alternative"])  # pyright: ignore
    return rows


def class_of(row: RegistryRow) -> KeyClass:
    """What becomes of a key: honoured where the schema holds it, else what the table says."""
    return "honoured" if row.key.removesuffix(".*") in schema_leaves() else row.kind


def default_of(key: str) -> str:
    """A key's default as text: the schema's, or the inert values of a key that the schema lacks."""
    if key in schema_defaults():
        return json.dumps(schema_defaults()[key])
    row = registry().get(key)
    return " or ".join(map(json.dumps, row.inert)) if row else ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the table says of one key of a file. kind ``unknown``: neither the table nor the schema has it."""

    key: str
    value: object
    kind: Literal["ignored", "rejected", "unknown"]
    reason: str
    alternative: str


def take_foreign_keys(tree: dict[str, Any]) -> list[Verdict]:
    """Remove from a resolved configuration, in place, what the schema lacks; returns what must be said of it."""
    return list(_take(tree, "", whole=tree))


def _take(block: dict[str, Any], prefix: str, *, whole: dict[str, Any]) -> Iterator[Verdict]:
    for name in list(block):
        key, value = f"{prefix}{name}", block[name]
        if key in schema_sections():
            if isinstance(value, dict):
                yield from _take(value, f"{key}.", whole=whole)
        elif key not in _leaves():
            yield from _judge(key, value, whole=whole)
            del block[name]


@functools.cache
def _leaves() -> frozenset[str]:
    return frozenset(schema_leaves())


def _judge(key: str, value: Any, *, whole: dict[str, Any]) -> Iterator[Verdict]:
    row, block = registry().get(key), key in known_blocks()
    passed = None if row or block else _row_of_map(key)
    if isinstance(value, dict) and value and (block or passed):
        for name, inner in value.items():
            yield from _judge(f"{key}.{name}", inner, whole=whole)
    elif row := row or passed:
        if not row.is_inert(value, tree=whole):
            kind = "ignored" if row.kind == "ignored" else "rejected"
            yield Verdict(key, value, kind, row.reason, row.alternative)
    elif not block:
        nearest = nearest_key(key)
        alternative = f"the nearest known one is {nearest}" if nearest else "leave it out"
        yield Verdict(key, value, "unknown", "unknown key", alternative)
    elif value is not None and value != {}:
        yield Verdict(key, value, "rejected", "must be a block of keys", "give a block, or null")


def _row_of_map(key: str) -> RegistryRow | None:
    """The row of the pass-through map that a key is, or lies in."""
    while key:
        if row := registry().get(f"{key}.*"):
            return row
        key = key.rpartition(".")[0]
    return None


@functools.cache
def known_blocks() -> frozenset[str]:
    """Dotted names that hold known keys and are none themselves, or both."""
    keys = [key for key in (*registry(), *schema_leaves()) if not key.endswith(".*")]
    return frozenset({key[:end] for key in keys for end, sign in enumerate(key) if sign == "."})


@functools.cache
def _names_by_block() -> dict[str, tuple[str, ...]]:
    names: dict[str, list[str]] = {}
    known = {key.removesuffix(".*") for key in registry()} | set(schema_leaves()) | known_blocks()
    for key in sorted(known):
        block, _, name = key.rpartition(".")
        names.setdefault(block, []).append(name)
    return {block: tuple(inner) for block, inner in names.items()}


def nearest_key(key: str) -> str | None:
    """The known key that a wrong one most likely means: a like name in its block, or its name in another block."""
    block, _, name = key.rpartition(".")
    ranked = sorted((edits(name, known), known) for known in _names_by_block().get(block, ()))
    if ranked and ranked[0][0] <= max(1, len(name) // 3):
        return f"{block}.{ranked[0][1]}" if block else ranked[0][1]
    elsewhere = sorted(f"{other}.{name}" for other, names in _names_by_block().items() if other and name in names)
    return min(elsewhere, key=lambda known: (edits(block, known.rpartition(".")[0]), known)) if elsewhere else None


def edits(one: str, other: str) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours that make one text of the other."""
    before, last = list[int](), list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        row = [i]
        for j, b in enumerate(other, start=1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]
