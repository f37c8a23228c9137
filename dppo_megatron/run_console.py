"""Where a run speaks to people: plain lines in a file, a live table on a terminal."""

import io
import logging
import os
from collections import deque
from typing import IO, TextIO, cast

from rich.console import Console
from rich.live import Live

from dppo_megatron.live_table import COLUMNS, cells, closing_block, live_table
from dppo_megatron.run_records import StepRecord, SummaryRecord, Totals
from dppo_megatron.terminal_text import printable

logger = logging.getLogger(__name__)

_HEADER_PERIOD = 20  # lines
_RECENT_STEPS = 12  # rows of the live table; the time left is estimated from them


class LastingStream(io.TextIOBase):
    """A text stream that falls silent, with one warning, when its reader has gone.

    Training must outlive ``dppo train | head`` and a full disk under a redirected log.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The wrapped stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the wrapped stream is a terminal."""
        return not self._stream.closed and self._stream.isatty()

    def fileno(self) -> int:
        """The wrapped stream's descriptor."""
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Write what the encoding can say of the text, if anybody still listens."""
        if not self._lost:
            try:
                if self._stream.closed:
                    raise BrokenPipeError("the stream is closed")
                self._stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush, if anybody still listens."""
        if not self._lost:
            try:
                if not self._stream.closed:
                    self._stream.flush()
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        self._lost = True
        logger.warning("console output stops (%s); metrics.jsonl goes on", error)
        try:
            descriptor = self._stream.fileno()
        except (OSError, ValueError):
            return
        # What is still buffered would raise again when the interpreter flushes it at exit.
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, descriptor)
        os.close(sink)


class _Pace:
    """The recent steps of this process, and what they say of the time left."""

    def __init__(self, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._recent: deque[StepRecord] = deque(maxlen=_RECENT_STEPS)
        self.totals = Totals()

    def add(self, record: StepRecord) -> tuple[str, ...]:
        """The step's cells, with the time left after it."""
        self._recent.append(record)
        self.totals = self.totals.with_step(record)
        mean = sum(recent.stage_seconds.total for recent in self._recent) / len(self._recent)
        left = max(0, self._num_steps - record.step - 1)
        return cells(record, totals=self.totals, num_steps=self._num_steps, seconds_left=mean * left)

    @property
    def recent(self) -> tuple[StepRecord, ...]:
        """The recent steps, the newest last."""
        return tuple(self._recent)


class PlainConsole:
    """One aligned line a step, a header every 20: for files and pipes."""

    def __init__(self, stream: LastingStream, *, num_steps: int) -> None:
        self._stream = stream
        self._pace = _Pace(num_steps=num_steps)
        self._lines = 0

    def step(self, record: StepRecord) -> None:
        """Write the step's line."""
        if self._lines % _HEADER_PERIOD == 0:
            self._write(_aligned(tuple(heading for heading, _ in COLUMNS)))
        self._lines += 1
        self._write(_aligned(self._pace.add(record)))

    def note(self, text: str) -> None:
        """Write a message."""
        self._write(printable(text))

    def summary(self, summary: SummaryRecord) -> None:
        """Write the closing block."""
        self._write("\n".join(closing_block(summary, bar="#")))

    def close(self) -> None:
        """Nothing is left to do."""

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveConsole:
    """A table of the recent steps that is redrawn in place: for terminals.

    It draws when a step ends, from no thread of its own.
    """

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._console = console
        self._pace = _Pace(num_steps=num_steps)
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_RECENT_STEPS)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def step(self, record: StepRecord) -> None:
        """Redraw the table with the step as its last row."""
        self._rows.append(self._pace.add(record))
        table = live_table(
            tuple(self._rows),
            recent=self._pace.recent,
            totals=self._pace.totals,
            num_steps=self._num_steps,
        )
        self._live.start()
        self._live.update(table, refresh=True)

    def note(self, text: str) -> None:
        """Print a message above the table."""
        self._console.print(printable(text), markup=False, highlight=False)

    def summary(self, summary: SummaryRecord) -> None:
        """Leave the last table standing and print the closing block."""
        self.close()
        bar = "#" if self._console.options.ascii_only else "\u2588"
        self._console.print("\n".join(closing_block(summary, bar=bar)), markup=False, highlight=False)

    def close(self) -> None:
        """Give the terminal back, cursor shown."""
        self._live.stop()


def open_console(stream: TextIO, *, num_steps: int) -> PlainConsole | LiveConsole:
    """The console that suits a stream: live on a terminal that can move its cursor, else plain."""
    lasting = LastingStream(stream)
    if lasting.isatty():
        console = Console(file=cast(IO[str], lasting))
        if not console.is_dumb_terminal:
            return LiveConsole(console, num_steps=num_steps)
    return PlainConsole(lasting, num_steps=num_steps)


def _aligned(texts: tuple[str, ...]) -> str:
    return " ".join(f"{text:>{width}}" for text, (_, width) in zip(texts, COLUMNS, strict=True))
