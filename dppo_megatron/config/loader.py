"""Load a configuration: files, overrides, interpolation, the registry's verdicts, defaults, types, rules.

Interpolations are resolved last, within what the files and overrides say: our own defaults are filled in
afterwards, so a file cannot interpolate a key that none of them sets. All problems are reported at once.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from dppo_megatron.config.files import REPLACE, ancestors, merge_places, read_files
from dppo_megatron.config.named_sets import locate
from dppo_megatron.config.overrides import apply_override
from dppo_megatron.config.problem import REQUIRED, ConfigError, Place, Problem
from dppo_megatron.config.registry import registry, take_foreign_keys
from dppo_megatron.config.rules import RANGE_TEXTS, find_problems
from dppo_megatron.config.schema import Config, DatasetConfig, TrainDatasetConfig
from dppo_megatron.config.sections import (
    build_config,
    fill_defaults,
    hints,
    schema_defaults,
    schema_leaves,
    schema_sections,
    select,
)

_RESOLVERS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and where it came from.

    container: what the files and overrides say, resolved, our defaults left out.
    effective: the schema's keys with all defaults; written to a file, it loads to the same ``config``.
    files: those read, in the order of merging (the later wins). places: by dotted key, see ``where``.
    warnings: keys that are ignored.
    """

    config: Config
    container: dict[str, Any]
    effective: dict[str, Any]
    files: tuple[Path, ...]
    places: dict[str, Place] = field(repr=False)
    warnings: tuple[Problem, ...] = ()

    def place(self, key: str) -> Place:
        """Where a dotted key, or the block that holds it, was set last; the file itself for a default."""
        places = (self.places[part] for part in ancestors(key) if part in self.places)
        return next(places, Place.of_file(self.files[-1]) if self.files else Place("default"))

    def where(self, key: str) -> str:
        """Where a dotted key was set last: ``file:line``, ``override text``, or ``default``."""
        return str(self.places.get(key, "default"))


@dataclass(frozen=True, slots=True)
class Examination:
    """What is found of a configuration; with errors, stand-ins are in ``loaded`` where values were refused."""

    loaded: LoadedConfig
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load a file, the files that it names as ``defaults`` and the overrides into the schema's sections.

    The rules between keys are left to ``examine`` and ``check_config``.
    Raises: ConfigError naming every problem, with key, value, place and what to do instead.
    """
    draft = _Draft(path, overrides, is_known=_is_known)
    loaded = draft.load()
    draft.raise_problems()
    return loaded


def examine(path: Path | str, overrides: Sequence[str] = ()) -> Examination:
    """Load a configuration and try every rule; returns all errors and warnings, and raises none of them."""
    draft = _Draft(path, overrides, is_known=_is_known)
    loaded = draft.load()
    draft.try_rules(loaded)
    return Examination(loaded, tuple(draft.problems.values()), loaded.warnings)


def require_config(path: Path | str, overrides: Sequence[str] = (), *, strict: bool = False) -> LoadedConfig:
    """Load a configuration that breaks no rule; ``strict`` takes warnings as errors.

    Raises: ConfigError naming every problem.
    """
    found = examine(path, overrides)
    errors = found.errors + (found.warnings if strict else ())
    if errors:
        raise ConfigError(errors)
    return found.loaded


def load_container(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Load what the files and overrides say, resolved as NeMo-RL resolves it, before any key is judged.

    A plain override must name a key that is there, save under ``dppo``.
    Raises: ConfigError when a file, an override or an interpolation is at fault.
    """
    draft = _Draft(path, overrides, is_known=lambda key: key.startswith("dppo."))
    container = draft.resolve()
    draft.raise_problems()
    return container


def _is_known(key: str) -> bool:
    return key.startswith("dppo.") or key in schema_leaves() or key in schema_sections() or key in registry()


class _Draft:
    """A configuration on its way to the schema; collects the problems that it meets, one a key."""

    def __init__(self, path: Path | str, overrides: Sequence[str], *, is_known: Callable[[str], bool]) -> None:
        for name, function in _RESOLVERS.items():
            if not OmegaConf.has_resolver(name):
                OmegaConf.register_new_resolver(name, function)
        self.path = Path(path).resolve()
        merged = read_files(self.path)
        self.tree, self.places, self.files = merged.tree, merged.places, merged.files
        self.problems = {f"{problem.place} {problem.key}": problem for problem in merged.problems}
        # What is missing may be in the files that could not be read.
        self.is_whole = not merged.problems
        self.followers: frozenset[str] = frozenset()
        for text in overrides:
            self._override(text, is_known)

    def _override(self, text: str, is_known: Callable[[str], bool]) -> None:
        # A refused override may have been applied in part.
        changed = copy.deepcopy(self.tree)
        try:
            leaves = apply_override(changed, text, is_known=is_known)
        except ValueError as error:
            reason, _, alternative = str(error).removeprefix(f"{text}: ").partition("; ")
            alternative = alternative or "write KEY=VALUE in Hydra's grammar"
            self.problems[text] = Problem("", None, Place.of_override(text), reason, alternative)
            return
        self.tree = changed
        self.places = merge_places(self.places, dict.fromkeys(leaves, Place.of_override(text)))

    def raise_problems(self) -> None:
        if self.problems:
            raise ConfigError(list(self.problems.values()))

    def load(self) -> LoadedConfig:
        container = self.resolve()
        effective = copy.deepcopy(container)
        warnings = self._judge_foreign_keys(effective)
        self._find_datasets(effective)
        self.followers = fill_defaults(effective)
        config = build_config(effective, refuse=self._refuse)
        return LoadedConfig(config, container, effective, self.files, self.places, warnings)

    def try_rules(self, loaded: LoadedConfig) -> None:
        # A refused value has a stand-in: what the rules then say of it, or of others because of it, is void.
        refused = {problem.key for problem in self.problems.values()}
        last_names = {key.rpartition(".")[2] for key in refused if key}
        for key, value, allowed in find_problems(loaded.config):
            is_stand_in = value is not None and select(loaded.effective, key) is None
            if key not in refused and not is_stand_in and not any(name in allowed for name in last_names):
                alternative = "" if allowed in RANGE_TEXTS else "change it, or what it must agree with"
                self._refuse(key, value, allowed, _alternative_of_registry(key) or alternative)

    def _refuse(self, key: str, value: object, reason: str, alternative: str = "") -> None:
        if key in self.followers:
            return
        if reason == REQUIRED and not self._is_missed(key):
            return
        self.problems.setdefault(key, self._problem(key, value, reason, alternative or _alternative(key)))

    def _is_missed(self, key: str) -> bool:
        """Whether a required key's absence is not explained by a file, or a key of its block, that was refused."""
        block = key.rpartition(".")[0]
        explained = block and any(found.key.rpartition(".")[0] == block for found in self.problems.values())
        return self.is_whole and not explained

    def _problem(self, key: str, value: object, reason: str, alternative: str) -> Problem:
        places = (self.places[part] for part in ancestors(key) if part in self.places)
        return Problem(key, value, next(places, Place.of_file(self.path)), reason, alternative)

    def resolve(self) -> dict[str, Any]:
        """The plain container; a value that cannot be resolved is a problem and comes out as None."""
        for node, name, key, error in list(_unresolvable(self.tree)):
            value = OmegaConf.to_container(node, resolve=False)[name]  # pyright: ignore
            self._refuse(key, value, error, "set what it names, or write a value")
            node[name] = None
        container = OmegaConf.to_container(self.tree, resolve=True)
        assert isinstance(container, dict)
        return container  # pyright: ignore[reportReturnType]

    def _judge_foreign_keys(self, tree: dict[str, Any]) -> tuple[Problem, ...]:
        """Take what the schema lacks out of the tree; errors are kept, warnings returned."""
        warnings = []
        for verdict in take_foreign_keys(tree):
            reason, alternative = verdict.reason, verdict.alternative
            if verdict.key.endswith(REPLACE):
                reason = f"{REPLACE} replaces blocks at the top level of a file with defaults only"
                alternative = "leave it out"
            if verdict.kind == "ignored":
                warnings.append(self._problem(verdict.key, verdict.value, reason, alternative))
            else:
                self._refuse(verdict.key, verdict.value, reason, alternative)
        return tuple(warnings)

    def _find_datasets(self, tree: dict[str, Any]) -> None:
        """Move ``data.default`` into what ``data.train`` and ``data.validation`` leave open, and find named sets."""
        data = tree.get("data")
        if not isinstance(data, dict):
            return
        shared = data.pop("default", None) or {}
        if not isinstance(shared, dict):
            return self._refuse("data.default", shared, "must be a block of keys")
        for part, section in (("train", TrainDatasetConfig), ("validation", DatasetConfig)):
            block = data.get(part)
            if not isinstance(block, dict):
                continue
            for name in (name for name in hints(section) if name in shared and name not in block):
                block[name] = shared[name]
                key = f"data.default.{name}"
                self.places[f"data.{part}.{name}"] = self._problem(key, None, "", "").place
            for name, value, reason, alternative in locate(block):
                self._refuse(f"data.{part}.{name}", value, reason, alternative)


def _alternative(key: str) -> str:
    """What to write where a reason alone does not say it."""
    if alternative := _alternative_of_registry(key):
        return alternative
    default = schema_defaults().get(key)
    return f"the default is {'null' if default is None else default}" if key in schema_defaults() else "set it"


def _alternative_of_registry(key: str) -> str:
    row = registry().get(key)
    return row.alternative if row else ""


def _unresolvable(node: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str, str]]:
    for name in range(len(node)) if isinstance(node, ListConfig) else list(node.keys()):
        key = f"{prefix}{name}"
        if OmegaConf.is_missing(node, name):
            continue
        try:
            value = node[name]
        except InterpolationResolutionError as error:
            yield node, name, key, str(error).splitlines()[0]
            continue
        if OmegaConf.is_config(value) and not OmegaConf.is_interpolation(node, name):
            yield from _unresolvable(value, f"{key}.")
