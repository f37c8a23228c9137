"""The schema's frozen sections, as types to walk: keys, defaults, and values that are tried for fit."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dppo_megatron.config.problem import REQUIRED
from dppo_megatron.config.schema import Config, TrainDatasetConfig

# Key, value, what is wrong with it.
Refuse = Callable[[str, object, str], None]


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The fields of a section with their types."""
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


@functools.cache
def schema_sections() -> frozenset[str]:
    """Dotted names of the sections; ``data.default``, which fills two of them, is one."""
    return frozenset({key for key, annotation in _walk(Config, "") if _section_of(annotation)} | {"data.default"})


@functools.cache
def schema_leaves() -> tuple[str, ...]:
    """Dotted keys that hold a value."""
    shared = (f"data.default.{name}" for name in hints(TrainDatasetConfig))
    return (*(key for key, annotation in _walk(Config, "") if not _section_of(annotation)), *shared)


def _walk(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, annotation in hints(cls).items():
        yield f"{prefix}{name}", annotation
        if section := _section_of(annotation):
            yield from _walk(section, f"{prefix}{name}.")


@functools.cache
def schema_defaults() -> dict[str, Any]:
    """The default of each leaf that has one; one that follows another key is ``${key}``."""
    found: dict[str, Any] = {}

    def collect(cls: type, prefix: str) -> None:
        for spec in dataclasses.fields(cls):
            if section := _section_of(hints(cls)[spec.name]):
                collect(section, f"{prefix}{spec.name}.")
            elif (default := _default(spec)) is not dataclasses.MISSING:
                found[f"{prefix}{spec.name}"] = default

    collect(Config, "")
    return found


def fill_defaults(tree: dict[str, Any]) -> frozenset[str]:
    """Add the schema's defaults to the tree in place, those that follow other keys last; returns the followers."""
    followed: dict[str, tuple[dict[str, Any], str]] = {}
    _fill_section(Config, tree, "", followed)
    for key, (section, target) in followed.items():
        while target in followed:
            target = followed[target][1]
        section[key.rpartition(".")[2]] = select(tree, target)
    return frozenset(followed)


def _fill_section(
    cls: type, tree: dict[str, Any], prefix: str, followed: dict[str, tuple[dict[str, Any], str]]
) -> None:
    for spec in dataclasses.fields(cls):
        section = _section_of(hints(cls)[spec.name])
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
            tree[spec.name] = list(default) if isinstance(default, tuple) else default
        if section and isinstance(tree.get(spec.name), dict):
            _fill_section(section, tree[spec.name], f"{prefix}{spec.name}.", followed)


def select(tree: Any, key: str) -> Any:
    """The value of a dotted key, or None where there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def build_config(tree: dict[str, Any], *, refuse: Refuse) -> Config:
    """Build the configuration; a value that does not fit is refused, and its default, if any, stands in for it."""
    return _build(Config, tree, "", refuse)


def _build(cls: Any, tree: object, key: str, refuse: Refuse) -> Any:
    if not isinstance(tree, dict):
        refuse(key, tree, "must be a block of keys")
        tree, refuse = {}, _accept
    prefix = f"{key}." if key else ""
    arguments: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        name, annotation = spec.name, hints(cls)[spec.name]
        if name not in tree:
            if _default(spec) is dataclasses.MISSING:
                refuse(prefix + name, None, REQUIRED)
            arguments[name] = _stand_in(spec, annotation)
            continue
        fits, value = _try(annotation, tree[name], prefix + name, refuse)
        arguments[name] = value if fits else _stand_in(spec, annotation)
    return cls(**arguments)


def _accept(key: str, value: object, reason: str) -> None:
    """Say nothing: what holds the value has been refused already."""


def _stand_in(spec: dataclasses.Field[Any], annotation: Any) -> Any:
    """What takes the place of a value that was refused, so that the rest can be looked at too."""
    section, default = _section_of(annotation), _default(spec)
    if section and default is not None:
        return _build(section, {}, "", _accept)
    if default is not dataclasses.MISSING and not (isinstance(default, str) and default.startswith("${")):
        return default
    kind = next(choice for choice in _choices(annotation) if choice is not NoneType)
    return get_args(kind)[0] if get_origin(kind) is Literal else {str: "", int: 1, float: 1.0}[kind]


def _try(annotation: Any, value: Any, key: str, refuse: Refuse) -> tuple[bool, Any]:
    choices = _choices(annotation)
    if value is None and NoneType in choices:
        return True, None
    if value == "???":
        refuse(key, value, "mandatory, and not set")
        return False, None
    (kind,) = (choice for choice in choices if choice is not NoneType)
    origin = get_origin(kind)
    if section := _section_of(annotation):
        return True, _build(section, value, key, refuse)
    if origin is tuple and isinstance(value, list):
        items = [_try(get_args(kind)[0], item, f"{key}.{i}", refuse) for i, item in enumerate(value)]
        return all(fits for fits, _ in items), tuple(item for _, item in items)
    if kind is float and type(value) is int:
        return True, float(value)
    # By type and value: in Python True is 1.
    fits = value in get_args(kind) if origin is Literal else type(value) is (origin or kind)
    if not fits:
        refuse(key, value, f"must be {_describe(annotation)}")
    return fits, value
