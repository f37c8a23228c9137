"""What the pages for users say is true: their commands run, their messages exist, their links lead somewhere."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("looking-at-runs.md", "writing-a-reward.md", "troubleshooting.md")
NOT_RUN = "# not run here"


def blocks(page: str, language: str) -> list[str]:
    """Fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)


def test_every_command_runs_or_is_marked(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny-sort").symlink_to(tiny_model)
    (module,) = blocks("writing-a-reward.md", "python")
    (tmp_path / "digits.py").write_text(module)
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines() if line.strip()]
    assert len(lines) >= 7
    for line in lines:
        if line.endswith(NOT_RUN):
            continue
        program, *arguments = shlex.split(line)
        assert program == "dppo", line
        if arguments[0] == "train":
            arguments += ["grpo.max_num_steps=2", "grpo.max_val_samples=8"]  # the whole run takes too long here
        command = [sys.executable, "-W", "ignore", "-m", "dppo_megatron", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    for written in ("quickstart/report.html", "comparison.html", "quickstart/evaluation/validation.jsonl"):
        assert (tmp_path / "results" / written).stat().st_size > 1000


def messages() -> list[str]:
    """Every text of the source, {} where a value is filled in."""
    texts = []
    for path in (ROOT / "dppo_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                texts.append("".join(map(str, parts)))
    return texts


HEADINGS = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_message_that_is_explained_is_one_that_is_given(heading: str) -> None:
    pattern = ".*".join(re.escape(part.strip()) for part in heading.split("..."))
    assert any(re.search(pattern, text, re.DOTALL) for text in messages()), heading


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs" / page).read_text()):
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target
