"""Command-line overrides in Hydra's grammar, applied to a merged configuration."""

from collections.abc import Callable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException


def apply_override(tree: DictConfig, text: str, *, is_known: Callable[[str], bool]) -> tuple[str, ...]:
    """Apply one override to the tree in place and return the keys of the leaves that it set.

    ``a.b=v`` must exist, in the tree or by ``is_known``; ``+a.b=v`` must not (null counts as absent);
    ``++a.b=v`` either; ``~a.b`` and ``~a.b=v`` delete. Mappings merge, lists replace.

    Raises: ValueError when the text is not of the grammar, is a sweep, or does not fit the tree.
    """
    override = _parse(text)
    key = override.key_or_group
    value = override.value()
    try:
        if override.is_delete():
            _delete(tree, key, expected=value)
            return ()
        if override.is_add():
            if OmegaConf.select(tree, key) is not None and not isinstance(value, dict | list):
                raise ValueError(f"{text}: {key} exists already; write {text[1:]} or +{text}")
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
        elif override.is_force_add():
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
        else:
            _change(tree, key, value, is_known=is_known, text=text)
    except OmegaConfBaseException as error:
        raise ValueError(f"{text}: {str(error).splitlines()[0]}") from error
    return tuple(_leaves(key, value))


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = " ".join(str(error).split("See https:")[0].split())
        raise ValueError(f"{text}: not an override ({reason})") from error
    if override.is_sweep_override():
        raise ValueError(f"{text}: a sweep; one run takes one value a key (quote it if it is a string)")
    if override.package is not None:
        raise ValueError(f"{text}: @ selects a package of Hydra's; there are none here")
    return override


def _delete(tree: DictConfig, key: str, *, expected: Any) -> None:
    found = OmegaConf.select(tree, key)
    if found is None:
        raise ValueError(f"~{key}: no such key")
    if expected is not None and expected != found:
        raise ValueError(f"~{key}={expected}: the value is {found}")
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(tree, parent) if parent else tree
    del section[name]


def _change(tree: DictConfig, key: str, value: Any, *, is_known: Callable[[str], bool], text: str) -> None:
    OmegaConf.set_struct(tree, True)
    try:
        OmegaConf.update(tree, key, value, merge=True)
    except (ConfigAttributeError, ConfigKeyError) as error:
        if not all(is_known(leaf) for leaf in _leaves(key, value)):
            raise ValueError(f"{text}: no such key; write +{text} to add it") from error
        OmegaConf.update(tree, key, value, merge=True, force_add=True)
    finally:
        OmegaConf.set_struct(tree, False)


def _leaves(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, dict) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name}", inner)
