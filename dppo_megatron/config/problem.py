"""What is wrong with a configuration: one record a problem, with its place and what to do instead."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REQUIRED = "required, and not set"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a key was set: a file and a line, a file alone, or an override (``file`` is then its text)."""

    file: str
    line: int | None = None

    @classmethod
    def of_file(cls, path: Path, line: int | None = None) -> "Place":
        """A place in a file."""
        return cls(str(path), line)

    @classmethod
    def of_override(cls, text: str) -> "Place":
        """An override of the command line."""
        return cls(f"override {text}")

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One key that cannot be used as it stands, or (a warning) that changes nothing here.

    key: dotted, or empty where a whole file or override is at fault. alternative: what to write instead.
    """

    key: str
    value: object
    place: Place
    reason: str
    alternative: str

    def __str__(self) -> str:
        value = "" if self.reason == REQUIRED else f" = {reprlib.repr(self.value)}"
        key = f"{self.key}{value}: " if self.key else ""
        return f"{self.place}: {key}{self.reason}; {self.alternative}"


class ConfigError(ValueError):
    """A configuration that cannot be used; ``problems`` holds them all."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)
