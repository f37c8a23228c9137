"""The GPU stack's constraints can be met together, by what the packages' own metadata says."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PINS: dict[str, str] = {
    canonicalize_name(name): version
    for name, _, version in (
        line.partition("==")
        for line in (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
        if not line.startswith("#")
    )
}
METADATA: dict[str, Any] = {
    canonicalize_name(name): one
    for name, one in json.loads((ROOT / "tests" / "data" / "gpu_stack.json").read_text()).items()
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FROM_SOURCE = {"transformer-engine-torch"}  # its metadata is made by building it
PYTHONS = ("3.11", "3.12")


def environment(python: str, extra: str = "") -> dict[str, str]:
    """Linux on x86-64."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": extra,
    }


def unmet(text: str, *, python: str, extra: str = "") -> str | None:
    """What stands against a requirement; None where it is met or not asked for."""
    wanted = Requirement(text)
    if wanted.marker is not None and not wanted.marker.evaluate(environment(python, extra)):
        return None
    pin = PINS.get(canonicalize_name(wanted.name))
    if pin is None:
        return f"{text}: not in requirements/gpu.txt"
    return None if wanted.specifier.contains(pin, prereleases=True) else f"{text}: pinned to {pin}"


@pytest.mark.parametrize("python", PYTHONS)
def test_every_package_s_requirements_are_met_by_the_pins(python: str) -> None:
    problems = [
        f"{name}: {problem}"
        for name, one in METADATA.items()
        for text in one["requires"]
        if (problem := unmet(text, python=python))
    ]
    problems += [
        f"{name}: Python {one['requires_python']}"
        for name, one in METADATA.items()
        if not SpecifierSet(one["requires_python"] or "").contains(f"{python}.9")
    ]
    assert not problems


@pytest.mark.parametrize("python", PYTHONS)
def test_the_project_s_own_requirements_are_met_with_its_extras(python: str) -> None:
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]
    wanted += PROJECT["optional-dependencies"]["vllm"]
    assert not [problem for text in wanted if (problem := unmet(text, python=python))]


def test_pins_and_metadata_are_of_the_same_versions() -> None:
    assert {name: one["version"] for name, one in METADATA.items()} == {
        name: version for name, version in PINS.items() if name not in FROM_SOURCE
    }
    assert set(PINS) >= {"torch", "megatron-core", "transformer-engine", "transformer-engine-cu13", "vllm"}
    assert PINS["transformer-engine-torch"] == PINS["transformer-engine"] == PINS["transformer-engine-cu13"]


def test_what_megatron_core_asks_of_transformer_engine_is_met() -> None:
    # It says so in an extra of its own, which brings much that is not needed here.
    assert SpecifierSet(">=2.9.0a0,<2.12").contains(PINS["transformer-engine"])


def test_a_pin_out_of_range_is_seen() -> None:
    assert unmet("torch<2.13", python="3.12") == f"torch<2.13: pinned to {PINS['torch']}"
    assert unmet('torch<2.13; python_version < "3.12"', python="3.12") is None
    assert unmet("not-there", python="3.12") == "not-there: not in requirements/gpu.txt"
