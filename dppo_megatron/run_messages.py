"""What a run says beside its numbers: notes and warnings, kept in messages.jsonl and grouped by kind."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dppo_megatron.atomic_file import atomic_write_text

MESSAGES_FILE = "messages.jsonl"

Level = Literal["note", "warning"]

_CONSOLE = "dppo_megatron.run_console"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. step: steps done when it was said. kind: what repeats of it have in common."""

    step: int
    level: Level
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """Messages of one kind. first, last: steps done at the first and the last of them. text: the first one's."""

    level: Level
    text: str
    count: int
    first: int
    last: int


def append_message(directory: Path, message: Message) -> None:
    """Add a line to messages.jsonl."""
    with (directory / MESSAGES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(message)) + "\n")


def cut_messages(directory: Path, *, step: int, latest: Sequence[Message]) -> None:
    """Keep what was said before a step, and the latest messages, which the present start has said already."""
    earlier = read_messages(directory)[: -len(latest) or None]
    kept = [message for message in earlier if message.step < step]
    lines = [json.dumps(asdict(message)) + "\n" for message in (*kept, *latest)]
    atomic_write_text(directory / MESSAGES_FILE, "".join(lines))


def read_messages(directory: Path) -> tuple[Message, ...]:
    """What the run has said so far; a last line cut short is left out."""
    path = directory / MESSAGES_FILE
    if not path.is_file():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return tuple(Message(**json.loads(line)) for line in lines if line.endswith("\n"))


def grouped(messages: Sequence[Message]) -> tuple[MessageGroup, ...]:
    """Messages by kind, in the order of their first appearance."""
    kinds: dict[tuple[Level, str], list[Message]] = {}
    for message in messages:
        kinds.setdefault((message.level, message.kind), []).append(message)
    return tuple(
        MessageGroup(level, found[0].text, len(found), found[0].step, found[-1].step)
        for (level, _), found in kinds.items()
    )


class WarningTap(logging.Handler):
    """Hands the warnings of this package's loggers to a run's log, instead of the error stream.

    A kind is a logger with its message before the values are filled in.
    """

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        """warn: called with kind and text."""
        super().__init__(logging.WARNING)
        self._warn = warn
        self._logger = logging.getLogger("dppo_megatron")
        self._propagated = True

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a warning on."""
        if record.name == _CONSOLE:
            logging.getLogger().handle(record)  # the console cannot tell of its own end
        self._warn(f"{record.name}: {record.msg}", record.getMessage())

    def attach(self) -> None:
        """Begin to listen."""
        self._propagated, self._logger.propagate = self._logger.propagate, False
        self._logger.addHandler(self)

    def detach(self) -> None:
        """Stop; warnings go where they went before."""
        if self in self._logger.handlers:
            self._logger.removeHandler(self)
            self._logger.propagate = self._propagated
