"""Configuration files and their inheritance, by NeMo-RL's rules.

``defaults:`` names one file or several, relative to the file that names them; the later wins. Mappings merge,
lists and scalars replace; ``_override_: true`` in a block at the top level of a file replaces that block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from dppo_megatron.config.problem import Place, Problem

REPLACE = "_override_"
_MEND = "mend the file"


class _YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # pyright: ignore[reportGeneralTypeIssues]
    """YAML with OmegaConf's numbers (1e-3 is one), by the parser in C where PyYAML has it: ten times faster."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers
    yaml_constructors = get_yaml_loader().yaml_constructors


@dataclass(frozen=True, slots=True)
class MergedFiles:
    """One file merged over its defaults, with the place of each key.

    files: those read, in the order of merging. problems: of files that could not be read, which are left out.
    """

    tree: DictConfig
    places: dict[str, Place]
    files: tuple[Path, ...]
    problems: tuple[Problem, ...] = ()


def read_files(path: Path) -> MergedFiles:
    """Read a file and all that it inherits from; every file that cannot be read is a problem of its own."""
    return _read_chain(path, named_by=(), at=Place.of_file(path))


def _read_chain(path: Path, *, named_by: tuple[Path, ...], at: Place) -> MergedFiles:
    chain = " <- ".join(str(file) for file in (path, *reversed(named_by)))
    key = "defaults" if named_by else ""
    if path in named_by:
        alternative = "leave one of these out of defaults"
        return _nothing(Problem(key, str(path), at, f"a cycle of defaults: {chain}", alternative))
    if not path.is_file():
        reason = "no such file" + (f"; the chain is {chain}" if named_by else "")
        alternative = "give a path relative to the file that names it" if named_by else "give a file that is there"
        return _nothing(Problem(key, str(path), at, reason, alternative))
    own = _read_file(path)
    if "defaults" not in own.tree:
        return own
    names = own.tree.pop("defaults")
    names = list(names) if isinstance(names, ListConfig) else [names]
    if not all(isinstance(name, str) for name in names):
        reason, alternative = "must be a path or a list of paths", "defaults: base.yaml"
        problem = Problem("defaults", names, own.places["defaults"], reason, alternative)
        return MergedFiles(own.tree, own.places, own.files, (*own.problems, problem))
    merged = MergedFiles(OmegaConf.create({}), {}, ())
    for name in names:
        base = (path.parent / name).resolve()
        merged = _merge(merged, _read_chain(base, named_by=(*named_by, path), at=own.places["defaults"]))
    return _merge(merged, own)


def _nothing(*problems: Problem) -> MergedFiles:
    return MergedFiles(OmegaConf.create({}), {}, (), problems)


def _read_file(path: Path) -> MergedFiles:
    try:
        loader = _YamlLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is None:
            return MergedFiles(OmegaConf.create({}), {}, (path,))
        if not isinstance(node, yaml.MappingNode):
            line = node.start_mark.line + 1
            return _nothing(Problem("", None, Place.of_file(path, line), "the top level must be a mapping", _MEND))
        marks = [(key, Place.of_file(path, line)) for key, line in _marks(node)]
        first: dict[str, Place] = {}
        repeated = tuple(
            Problem(key, None, place, f"set twice in one block; first at line {first[key].line}", "keep one")
            for key, place in marks
            if first.setdefault(key, place) is not place
        )
        if repeated:
            return _nothing(*repeated)
        tree = OmegaConf.create(loader.construct_document(node))
        assert isinstance(tree, DictConfig)
    except UnicodeDecodeError as error:
        return _nothing(Problem("", None, Place.of_file(path), f"not UTF-8 ({error.reason})", _MEND))
    except yaml.MarkedYAMLError as error:
        place = Place.of_file(path, error.problem_mark.line + 1 if error.problem_mark else None)
        return _nothing(Problem("", None, place, f"not YAML ({error.problem})", _MEND))
    except yaml.YAMLError as error:
        return _nothing(Problem("", None, Place.of_file(path), f"not YAML ({str(error).splitlines()[0]})", _MEND))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return _nothing(Problem(error.full_key or "", None, Place.of_file(path), reason, _MEND))
    return MergedFiles(tree, dict(marks), (path,))


def _marks(node: yaml.MappingNode, prefix: str = "") -> Iterator[tuple[str, int]]:
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        # An empty block merges, so it must not hide the places of what it is merged over.
        if not isinstance(value_node, yaml.MappingNode) or value_node.value:
            yield key, key_node.start_mark.line + 1
        if isinstance(value_node, yaml.MappingNode):
            yield from _marks(value_node, f"{key}.")


def _merge(base: MergedFiles, own: MergedFiles) -> MergedFiles:
    plain = OmegaConf.to_container(own.tree)
    assert isinstance(plain, dict)
    replaced = {str(name) for name, block in plain.items() if isinstance(block, dict) and block.get(REPLACE)}
    for name in replaced:
        own.tree[name].pop(REPLACE)
        base.tree.pop(name, None)
    tree = OmegaConf.merge(base.tree, own.tree)
    assert isinstance(tree, DictConfig)
    files = base.files + tuple(file for file in own.files if file not in base.files)
    places = merge_places(base.places, own.places, replaced=replaced)
    return MergedFiles(tree, places, files, base.problems + own.problems)


def merge_places(
    base: dict[str, Place], own: dict[str, Place], *, replaced: set[str] | frozenset[str] = frozenset()
) -> dict[str, Place]:
    """The places of keys after ``own`` was merged over ``base``."""
    blocks = {key.rpartition(".")[0] for key in own}
    covers = replaced | {key for key in own if key not in blocks}
    kept = {key: place for key, place in base.items() if covers.isdisjoint(ancestors(key))}
    return kept | own


def ancestors(key: str) -> Iterator[str]:
    """A dotted key and the blocks that hold it, inmost first."""
    while key:
        yield key
        key = key.rpartition(".")[0]
