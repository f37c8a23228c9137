"""Load a configuration: inheritance, overrides, defaults, types; all problems reported at once.

The merging rules are NeMo-RL's. ``defaults:`` names one file or several, relative to the file that names
them; the later wins. Mappings merge, lists and scalars replace; ``_override_: true`` in a block at the top
level of a file replaces that block. Interpolations are resolved last, within what the files and overrides
say: our own defaults are filled in afterwards, so a file cannot interpolate a key that none of them sets.
"""

import copy
import dataclasses
import difflib
import functools
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from dppo_megatron.config.overrides import apply_override
from dppo_megatron.config.schema import Config, DatasetConfig

_RESOLVERS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
_REPLACE = "_override_"


class ConfigError(ValueError):
    """A configuration that cannot be used; ``problems`` holds one line a problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and where it came from.

    container: what the files and overrides say, resolved, our defaults left out.
    effective: the same with all defaults; written to a file, it loads to the same ``config``.
    files: those read, in the order of merging (the later wins). places: by dotted key, see ``where``.
    """

    config: Config
    container: dict[str, Any]
    effective: dict[str, Any]
    files: tuple[Path, ...]
    places: dict[str, str] = field(repr=False)

    def where(self, key: str) -> str:
        """Where a dotted key was set last: ``file:line``, ``override text``, or ``default``."""
        return self.places.get(key, "default")


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load a file, the files that it names as ``defaults`` and the overrides into the schema's sections.

    Raises: ConfigError naming every problem, with key, value, place and what is allowed.
    """
    draft = _Draft(path, overrides)
    container = draft.resolve()
    effective = copy.deepcopy(container)
    draft.share_dataset_defaults(effective)
    draft.fill(effective)
    config = draft.section(Config, effective, key="")
    draft.raise_problems()
    return LoadedConfig(config, container, effective, draft.files, draft.places)


def load_container(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Load what the files and overrides say, resolved, without asking whether the schema knows the keys.

    Raises: ConfigError when a file, an override or an interpolation is at fault.
    """
    draft = _Draft(path, overrides)
    container = draft.resolve()
    draft.raise_problems()
    return container


@dataclass(frozen=True, slots=True)
class _Merged:
    """One file merged over its defaults, with the place of each key."""

    tree: DictConfig
    places: dict[str, str]
    files: tuple[Path, ...]


def _read_chain(path: Path, *, named_by: tuple[Path, ...] = ()) -> _Merged:
    chain = " <- ".join(str(file) for file in (path, *reversed(named_by)))
    if path in named_by:
        raise ConfigError([f"{path}: a cycle of defaults: {chain}"])
    if not path.is_file():
        raise ConfigError([f"{path}: no such file" + (f"; the chain is {chain}" if named_by else "")])
    own, places = _read_file(path)
    if "defaults" not in own:
        return _Merged(own, places, (path,))
    names = own.pop("defaults")
    names = list(names) if isinstance(names, ListConfig) else [names]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError([f"{places['defaults']}: defaults = {names!r}: must be a path or a list of paths"])
    merged = _Merged(OmegaConf.create({}), {}, ())
    for name in names:
        base = _read_chain((path.parent / name).resolve(), named_by=(*named_by, path))
        merged = _merge(merged, base)
    return _merge(merged, _Merged(own, places, (path,)))


def _read_file(path: Path) -> tuple[DictConfig, dict[str, str]]:
    loader = get_yaml_loader()(path.read_text(encoding="utf-8"))
    try:
        node = loader.get_single_node()
        if node is None:
            return OmegaConf.create({}), {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError([f"{path}:{node.start_mark.line + 1}: the top level must be a mapping"])
        marks = list(_marks(node))
        first: dict[str, int] = {}
        repeated = [
            f"{path}:{line}: {key} is set twice in one block; first at line {first[key]}"
            for key, line in marks
            if first.setdefault(key, line) != line
        ]
        if repeated:
            raise ConfigError(repeated)
        tree = OmegaConf.create(loader.construct_document(node))
        assert isinstance(tree, DictConfig)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError([f"{path}{line}: not YAML ({error.problem})"]) from error
    except OmegaConfBaseException as error:
        raise ConfigError([f"{path}: {error.full_key}: {str(error).splitlines()[0]}"]) from error
    return tree, {key: f"{path}:{line}" for key, line in marks}


def _marks(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        # An empty block merges, so it must not hide the places of what it is merged over.
        if not isinstance(value_node, yaml.MappingNode) or value_node.value:
            yield key, key_node.start_mark.line + 1
        if isinstance(value_node, yaml.MappingNode):
            yield from _marks(value_node, f"{key}.")


def _merge(base: _Merged, own: _Merged) -> _Merged:
    plain = OmegaConf.to_container(own.tree)
    assert isinstance(plain, dict)
    replaced = {str(name) for name, block in plain.items() if isinstance(block, dict) and block.get(_REPLACE)}
    for name in replaced:
        own.tree[name].pop(_REPLACE)
        base.tree.pop(name, None)
    tree = OmegaConf.merge(base.tree, own.tree)
    assert isinstance(tree, DictConfig)
    files = base.files + tuple(file for file in own.files if file not in base.files)
    return _Merged(tree, _merge_places(base.places, own.places, replaced=replaced), files)


def _merge_places(base: dict[str, str], own: dict[str, str], *, replaced: set[str]) -> dict[str, str]:
    blocks = {key.rpartition(".")[0] for key in own}
    covers = replaced | {key for key in own if key not in blocks}
    kept = {key: place for key, place in base.items() if covers.isdisjoint(_ancestors(key))}
    return kept | own


def _ancestors(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]


class _Draft:
    """A configuration on its way to the schema; collects the problems that it meets, one a key."""

    def __init__(self, path: Path | str, overrides: Sequence[str]) -> None:
        for name, function in _RESOLVERS.items():
            if not OmegaConf.has_resolver(name):
                OmegaConf.register_new_resolver(name, function)
        merged = _read_chain(Path(path).resolve())
        self.tree, self.places, self.files = merged.tree, merged.places, merged.files
        self.problems: dict[str, str] = {}
        for text in overrides:
            # A refused override may have been applied in part.
            changed = copy.deepcopy(self.tree)
            try:
                leaves = apply_override(changed, text, is_known=_is_known)
            except ValueError as error:
                self.problems[text] = f"override {error}"
                continue
            self.tree = changed
            places = dict.fromkeys(leaves, f"override {text}")
            self.places = _merge_places(self.places, places, replaced=set())
        # Keys that took another key's value, for which that key answers.
        self.followers: set[str] = set()

    def raise_problems(self) -> None:
        if self.problems:
            raise ConfigError(list(self.problems.values()))

    def refuse(self, key: str, value: object, reason: str) -> None:
        if key not in self.followers:
            self.problems[key] = f"{self._place(key)}: {key} = {reprlib.repr(value)}: {reason}"

    def _place(self, key: str) -> str:
        places = (self.places[part] for part in _ancestors(key) if part in self.places)
        return next(places, str(self.files[-1]))

    def resolve(self) -> dict[str, Any]:
        """The plain container; a value that cannot be resolved is a problem and comes out as None."""
        for node, name, key, error in list(_unresolvable(self.tree)):
            self.refuse(key, OmegaConf.to_container(node, resolve=False)[name], error)  # pyright: ignore
            node[name] = None
        container = OmegaConf.to_container(self.tree, resolve=True)
        assert isinstance(container, dict)
        return container  # pyright: ignore[reportReturnType]

    def share_dataset_defaults(self, tree: dict[str, Any]) -> None:
        """Move ``data.default`` into what ``data.train`` and ``data.validation`` leave open."""
        data = tree.get("data")
        if not isinstance(data, dict):
            return
        shared = data.pop("default", None) or {}
        if not isinstance(shared, dict):
            return self.refuse("data.default", shared, "must be a block of keys")
        for name in [name for name in shared if name not in _hints(DatasetConfig)]:
            self._refuse_unknown(f"data.default.{name}", shared.pop(name))
        for part in ("train", "validation"):
            block = data.get(part)
            if not isinstance(block, dict):
                continue
            for name in shared.keys() - block.keys():
                block[name] = shared[name]
                self.places[f"data.{part}.{name}"] = self._place(f"data.default.{name}")

    def fill(self, tree: dict[str, Any]) -> None:
        """Add the schema's defaults to the tree in place, those that follow other keys last."""
        followed: dict[str, tuple[dict[str, Any], str]] = {}
        _fill_section(Config, tree, "", followed)
        for key, (section, target) in followed.items():
            while target in followed:
                target = followed[target][1]
            self.followers.add(key)
            section[key.rpartition(".")[2]] = _select(tree, target)

    def section(self, cls: type, tree: object, *, key: str) -> Any:
        """Build one section; a value that does not fit is a problem and comes out as None."""
        if not isinstance(tree, dict):
            return self.refuse(key, tree, "must be a block of keys")
        hints = _hints(cls)
        prefix = f"{key}." if key else ""
        for name in tree:
            if name not in hints:
                self._refuse_unknown(f"{prefix}{name}", tree[name])
        arguments: dict[str, Any] = {}
        for name, annotation in hints.items():
            if name not in tree:
                missing = f"{self._place(prefix + name)}: {prefix}{name}: required, and not set"
                self.problems.setdefault(prefix + name, missing)
            arguments[name] = self._value(annotation, tree.get(name), key=prefix + name)
        return cls(**arguments)

    def _refuse_unknown(self, key: str, value: object) -> None:
        if key.endswith(_REPLACE):
            reason = f"{_REPLACE} replaces blocks at the top level of a file with defaults only"
        else:
            nearest = _nearest_key(key)
            reason = "unknown key" + (f"; the nearest known one is {nearest}" if nearest else "")
        self.refuse(key, value, reason)

    def _value(self, annotation: Any, value: Any, *, key: str) -> Any:
        if key in self.problems:
            return None
        choices = _choices(annotation)
        if value is None and NoneType in choices:
            return None
        if value == "???":
            return self.refuse(key, value, "mandatory, and not set")
        (kind,) = (choice for choice in choices if choice is not NoneType)
        origin = get_origin(kind)
        if section := _section_of(annotation):
            return self.section(section, value, key=key)
        if origin is tuple and isinstance(value, list):
            items = [self._value(get_args(kind)[0], item, key=f"{key}.{i}") for i, item in enumerate(value)]
            return tuple(items)
        if kind is float and type(value) is int:
            return float(value)
        fits = value in get_args(kind) if origin is Literal else type(value) is (origin or kind)
        if not fits:
            self.refuse(key, value, f"must be {_describe(annotation)}")
        return value


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


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _section_of(annotation: Any) -> type | None:
    return next((kind for kind in _choices(annotation) if dataclasses.is_dataclass(kind)), None)  # pyright: ignore


def _describe(annotation: Any) -> str:
    names = {NoneType: "null", str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    choices = _choices(annotation)
    if len(choices) > 1:
        return " or ".join(_describe(choice) for choice in choices)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(get_args(annotation))
    return names.get(annotation) or ("a list" if get_origin(annotation) is tuple else "a block of keys")


def _default(spec: dataclasses.Field[Any]) -> Any:
    return spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()


def _fill_section(
    cls: type, tree: dict[str, Any], prefix: str, followed: dict[str, tuple[dict[str, Any], str]]
) -> None:
    for spec in dataclasses.fields(cls):
        section = _section_of(_hints(cls)[spec.name])
        default = _default(spec)
        if spec.name in tree or default is dataclasses.MISSING:
            pass
        elif dataclasses.is_dataclass(default):
            # Only what this default changes: the rest is filled in below.
            values = {inner: getattr(default, inner.name) for inner in dataclasses.fields(default)}
            tree[spec.name] = {inner.name: value for inner, value in values.items() if value != _default(inner)}
        elif isinstance(default, str) and default.startswith("${"):
            followed[f"{prefix}{spec.name}"] = (tree, default[2:-1])
        else:
            tree[spec.name] = default
        if section and isinstance(tree.get(spec.name), dict):
            _fill_section(section, tree[spec.name], f"{prefix}{spec.name}.", followed)


def _select(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


@functools.cache
def _schema_keys() -> tuple[str, ...]:
    """Dotted keys of the schema, sections included."""

    def walk(cls: type, prefix: str) -> Iterator[str]:
        for name, annotation in _hints(cls).items():
            yield f"{prefix}{name}"
            if section := _section_of(annotation):
                yield from walk(section, f"{prefix}{name}.")

    shared = (f"data.default.{name}" for name in _hints(DatasetConfig))
    return (*walk(Config, ""), "data.default", *shared)


def _is_known(key: str) -> bool:
    return key.startswith("dppo.") or key in _schema_keys()


def _nearest_key(key: str) -> str | None:
    parent, _, name = key.rpartition(".")
    siblings = [known for known in _schema_keys() if known.rpartition(".")[0] == parent]
    by_name = difflib.get_close_matches(name, [known.rpartition(".")[2] for known in siblings], n=1)
    if by_name:
        return f"{parent}.{by_name[0]}" if parent else by_name[0]
    elsewhere = [known for known in _schema_keys() if known.rpartition(".")[2] == name]
    return elsewhere[0] if elsewhere else None
