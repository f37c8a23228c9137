"""What the pages for users say is true: their commands run, tools have the options, links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    "docs/looking-at-runs.md",  # first: it makes the run that other pages look at
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "looking-at-runs.md"),
)
NOT_RUN = "not run here"
COMMAND = re.compile(r"(dppo|torchrun|python|pip|make|sbatch|srun|head|for|\S+/bin/\S+|[A-Z_]+=\S+) ")
STANDS_FOR = {
    "FILE": "examples/quickstart.yaml",
    "CONFIG": "examples/quickstart.yaml",
    "RUN": "results/quickstart",
    "MODEL": "results/quickstart/hf",
    "N": "1",
}
"""What the tests put for the words that stand for something."""
SHORT = "grpo.max_num_steps=$(cat steps) grpo.max_val_samples=8 grpo.val_num_generations_per_prompt=1"
PROGRAMS = {
    "dppo": f'[ "$1" = train ] && set -- "$@" {SHORT}; exec {sys.executable} -W ignore -m dppo_megatron "$@"',
    "torchrun": f'exec {sys.executable} -W ignore -m torch.distributed.run "$@" {SHORT}',
}
"""The programs of the pages' commands; a whole run takes too long here."""


def blocks(page: str, language: str) -> list[str]:
    """Fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def commands(page: str) -> list[str]:
    """Lines of a page's fenced and indented blocks that a reader would type; a continued line is one."""
    text = (ROOT / page).read_text()
    indented = "\n".join(re.findall(r"^    (.*)$", text, re.MULTILINE))
    lines = "\n".join([*blocks(page, "(?:bash)?"), indented]).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if COMMAND.match(line)]


def test_commands_are_found_in_every_kind_of_block() -> None:
    found = {page: commands(page) for page in PAGES}
    assert len(found["README.md"]) >= 8
    assert any(line.startswith("head ") for line in found["docs/estimator.md"])
    assert any(line.startswith("sbatch ") for line in found["docs/production.md"])
    assert any("dppo.audit.period=1" in line and line.startswith("dppo ") for line in found["docs/estimator.md"])


def test_every_command_runs_or_is_marked(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny-sort").symlink_to(tiny_model)
    (module,) = blocks("docs/writing-a-reward.md", "python")
    (tmp_path / "digits.py").write_text(module)
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    lines = [line for page in PAGES for line in commands(page) if NOT_RUN not in line]
    assert len(lines) >= 16
    for number, line in enumerate(dict.fromkeys(lines)):
        (tmp_path / "steps").write_text(str(2 + number))  # so that a run that continues has something to do
        command = re.sub(r"\[[^]]*\]", "", line).split("     ")[0]  # without what is optional, and what it says
        command = re.sub(r"\b[A-Z]+\b", lambda word: STANDS_FOR.get(word[0], word[0]), command)
        done = subprocess.run(
            ["bash", "-ec", command], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    for written in ("quickstart/report.html", "comparison.html", "quickstart/evaluation/validation.jsonl"):
        assert (tmp_path / "results" / written).stat().st_size > 1000


TOOLS = sorted(
    {
        (tool, flag)
        for page in PAGES
        for tool, rest in re.findall(r"python (tools/\S+\.py|-m tools\.[\w.]+)([^`#\n]*)", (ROOT / page).read_text())
        for flag in re.findall(r"--[a-z][a-z-]*", rest) or [""]
    }
)


@pytest.mark.parametrize("tool", sorted({tool for tool, _ in TOOLS}))
def test_tools_have_the_options_that_pages_give_them(tool: str) -> None:
    # As a user's shell would, whose path does not hold the repository.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", *tool.split(), "--help"]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    for flag in (flag for name, flag in TOOLS if name == tool):
        assert flag in done.stdout, flag


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target
