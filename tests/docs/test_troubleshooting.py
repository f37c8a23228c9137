"""Every message that ends or marks a run has its entry in the troubleshooting page, and every entry its message.

Refused input (a ValueError, exit code 2) says itself what to write instead. Any other exception, warning or note of a
run, and what a command writes on standard error itself, needs an entry, unless all its words come from elsewhere.
"""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADINGS = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)

NO_ENTRY = {
    "an engine failed": "asks for a checkpoint; the engine's own words end the run",
    "the stream is closed": "caught: the console says that it stops",
    "the tokenizer fails on all prompts together, and on none alone": "a tokenizer that contradicts itself",
    "the model's parameters are not the table's: ...": "an architecture that was added by half",
    "... holds an earlier run; resume it, or log to an empty directory": "a RunLog without resume_from",
    "the engine has no weights: load_weights comes first": "the loop loads them first",
    "the engine has failed before: vLLM ...": "the first failure has ended the run",
    "the reward must return ... finite numbers; it returned an array of shape ... with ... that are not finite": (
        "our own rewards do; a user's values are checked in its process"
    ),
    "accuracy before training: ...": "no trouble",
    "dppo: ... cannot be written: ...": "beside the watchdog's message, which has its entry",
    "interrupted": "at the keyboard, by the reader",
    "unrecognized arguments: ...": "refused input, as argparse says it",
}
"""Texts that nobody need look up, and why."""

Names = dict[str, ast.expr]
"""What a function's local names stand for."""


def spelled(node: ast.AST, names: Names) -> str:
    """A text as the page spells it, ``...`` for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[a-z]", "...", text)
        case ast.JoinedStr(values=values):
            return "".join(spelled(value, names) for value in values)
        case ast.FormattedValue(value=ast.Name() as name):
            return spelled(name, names)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return spelled(left, names) + spelled(right, names)
        case ast.Name(id=name) if name in names:
            return spelled(names[name], {key: value for key, value in names.items() if key != name})
    return "..."


def modules() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "dppo_megatron").rglob("*.py"))]


def breaking_exceptions(trees: list[ast.Module]) -> set[str]:
    """Python's classes of exceptions and ours, without those of refused input and of our own errors."""
    kinds = [one for one in vars(builtins).values() if isinstance(one, type) and issubclass(one, BaseException)]
    names = {one.__name__ for one in kinds if not issubclass(one, ValueError | AssertionError)}
    ours = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in ours:  # as deep as they derive from each other
        names |= {one.name for one in ours if names & {ast.unparse(base) for base in one.bases}}
    return names


def said(node: ast.AST, names: Names, *, exceptions: set[str]) -> Iterator[str]:
    """What a node of a function tells people: an exception, a log's line, a complaint, a marked text."""
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        is_complaint = function == "complain" and ast.unparse(node.args[-1]) != "EXIT_USAGE"
        if function in exceptions or is_complaint:
            yield from (spelled(argument, names) for argument in node.args)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in (
            "warning",
            "error",
            "critical",
            "warn",
            "note",
        ):
            yield spelled(node.args[-1 if node.func.attr == "warn" else 0], names)
    elif isinstance(node, ast.JoinedStr) and (text := spelled(node, names)).startswith(("warning: ", "dppo: ")):
        yield text


def assigned(nodes: Iterable[ast.AST]) -> Names:
    pairs = [(node.targets[0], node.value) for node in nodes if isinstance(node, ast.Assign)]
    return {target.id: value for target, value in pairs if isinstance(target, ast.Name)}


def run_messages(trees: list[ast.Module]) -> set[str]:
    """The texts of a package that need an entry."""
    exceptions, found = breaking_exceptions(trees), set[str]()
    functions = ((tree, node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    for tree, function in functions:
        names = assigned(tree.body) | assigned(ast.walk(function))
        for node in ast.walk(function):
            found |= {text.strip() for text in said(node, names, exceptions=exceptions)}
    return {text for text in found if re.search("[a-z]", re.sub("^(warning|dppo|error|[:. ])+", "", text))}


def matches(heading: str, text: str) -> bool:
    pattern = ".*".join(re.escape(part.strip()) for part in heading.split("..."))
    return re.search(pattern, text, re.DOTALL) is not None


@pytest.mark.parametrize("text", sorted(run_messages(modules())))
def test_every_message_that_ends_or_marks_a_run_is_explained(text: str) -> None:
    explained = [heading for heading in HEADINGS if matches(heading, text)]
    assert explained or text in NO_ENTRY, "write its entry in docs/troubleshooting.md"
    assert not (explained and text in NO_ENTRY), f"it has an entry: {explained}"


def test_what_needs_no_entry_is_still_said() -> None:
    assert NO_ENTRY.keys() <= run_messages(modules())


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_message_that_is_explained_is_one_that_is_given(heading: str) -> None:
    texts = {spelled(node, {}) for tree in modules() for node in ast.walk(tree)}
    assert any(matches(heading, text) for text in texts), heading


def test_a_new_message_is_found_however_it_is_given() -> None:
    source = """
class Lost(RuntimeError): ...
_WHY = "worn out"
def work(log, path):
    text = f"the disk {path} " + "is gone"
    raise Lost(text)
def help(path) -> OSError:
    logger.warning("slow: %s", path)
    log.warn("kind", f"odd {path:.3g}")
    complain("it broke", EXIT_FAILED)
    complain("write it otherwise", EXIT_USAGE)
    sys.stderr.write(f"dppo: {path} was lost")
    return OSError(f"no room in {path.name}")
    raise ValueError("refused")
    raise SystemExit(_WHY)
    raise RuntimeError(str(path))
"""
    assert run_messages([ast.parse(source)]) == {
        "the disk ... is gone",
        "slow: ...",
        "odd ...",
        "it broke",
        "dppo: ... was lost",
        "no room in ...",
        "worn out",
    }
