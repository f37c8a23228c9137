"""The rules of the house, read off the source: who imports whom, and how large a room may be."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dppo_megatron"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

# What each part may import of the package itself; the rest stands above it.
BASE = {
    "architecture",
    "atomic_file",
    "batches",
    "config",
    "device",
    "metric_names",
    "ownership",
    "plan",
    "model_source",
    "stage_clock",
}
ALLOWED = {
    "rl": BASE | {"rl"},
    "parallel": BASE | {"parallel"},
    "config": {"architecture", "config", "plan"},
    "batches": set(),
    "device": set(),
    "plan": {"architecture", "config"},
}


def name_of(path: Path) -> str:
    """``rl/pruning.py`` as the test's id."""
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    """The part of the house that a file belongs to: a folder, or itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in ALLOWED], ids=name_of)
def test_a_part_imports_only_what_stands_below_it(path: Path) -> None:
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("dppo_megatron.")}
    assert ours <= ALLOWED[part_of(path)]


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) == "rl"], ids=name_of)
def test_the_algorithm_knows_neither_megatron_nor_processes(path: Path) -> None:
    assert not [name for name in imports(path) if re.match(r"megatron\b|torch\.distributed\b", name)]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_cuda_is_named_in_device_alone(path: Path) -> None:
    if path.name != "device.py":
        assert not re.search(r"torch\.cuda|[\"']cuda[\"']", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_mesh_reads_megatron_s_group_state(path: Path) -> None:
    if path.name != "mesh.py":
        assert not [name for name in imports(path) if "parallel_state" in name]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_collectives_call_torch_distributed(path: Path) -> None:
    calls = re.findall(r"\bdist\.(\w+)\(|torch\.distributed\.(\w+)\(", path.read_text())
    if path.name not in ("collectives.py", "mesh.py", "device.py"):
        assert not calls


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_everything_public_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.name != "__init__.py":
        assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def test_the_command_line_starts_without_torch() -> None:
    top_level = [node for node in ast.parse((PACKAGE / "cli.py").read_text()).body if isinstance(node, ast.Import)]
    assert not [alias.name for node in top_level for alias in node.names if alias.name.startswith("torch")]


@pytest.mark.parametrize("path", [path for path in FILES if path.name != "__init__.py"], ids=name_of)
def test_the_page_on_architecture_says_what_each_file_is(path: Path) -> None:
    says = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0].rstrip(".")
    folder = path.parent.relative_to(PACKAGE.parent)
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    section = page.split(f"### `{folder}/`\n")[1].split("\n### ")[0]
    assert f"| `{path.stem}` | {says} |" in section
