"""The run's log: metrics.jsonl, TensorBoard, the console and summary.json."""

import itertools
import math
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from dppo_megatron import metric_names
from dppo_megatron.atomic_file import atomic_write_text
from dppo_megatron.live_table import percent
from dppo_megatron.run_console import open_console
from dppo_megatron.run_messages import Message, WarningTap, append_message, cut_messages, grouped
from dppo_megatron.run_records import StepRecord, SummaryRecord, Totals
from dppo_megatron.wandb_sink import WandbSink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
TENSORBOARD_DIRECTORY = "tensorboard"


class RunLog:
    """Writes what a run does, on rank 0; a context manager, so that the terminal is given back.

    Steps come in order, from 0 or from where ``resume_from`` cut. TensorBoard counts the steps done, as
    NeMo-RL does: step s of the loop is its s + 1, and 0 is the validation before training.
    """

    def __init__(
        self, directory: Path, *, num_steps: int, tensorboard: bool, console: TextIO, wandb: WandbSink | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._console = open_console(console, num_steps=num_steps)
        self._tensorboard_enabled = tensorboard
        self._tensorboard: SummaryWriter | None = None
        self._wandb = wandb
        self._metrics: TextIOWrapper | None = None
        self._totals = Totals()
        self._next_step = 0
        self._accuracy_before: float | None = None
        self._non_finite: set[str] = set()
        self._messages: list[Message] = []  # of this start
        self._tap = WarningTap(self.warn)

    def resume_from(self, step: int) -> None:
        """Continue at a step: cut metrics.jsonl back to the steps before it and take up their totals.

        step: the first that will be logged; 0 starts over, and an earlier run's lines go to earlier_N/.
        Raises: RuntimeError where a line of metrics.jsonl, save a last one cut short, is not a step's.
        """
        assert self._metrics is None, "resume_from comes before the first step"
        path = self._directory / METRICS_FILE
        lines = read_metrics(path)
        kept = [(line, record) for line, record in lines if record.step < step]
        earlier = _set_aside(path) if lines and step == 0 else None
        if path.exists():
            atomic_write_text(path, "".join(line for line, _ in kept))
        for _, record in kept:
            self._totals = self._totals.with_step(record)
        self._next_step = step
        # What this start has said before it knew where it continues.
        self._messages = [replace(message, step=step) for message in self._messages]
        cut_messages(self._directory, step=step, latest=self._messages)
        if earlier is not None:
            self.note(f"{path}: {len(lines)} steps of an earlier run, now in {earlier}")
        elif len(kept) < len(lines):
            self.note(f"{path}: {len(lines) - len(kept)} later steps dropped, going on at step {step + 1}")
        if len(kept) < step:
            self.note(f"{path}: {step - len(kept)} of the {step} steps done are missing, in the totals too")

    def baseline(self, accuracy: float) -> None:
        """Log the validation before the first step; it goes into that step's line and the summary."""
        assert self._next_step == 0, "a resumed run has its baseline in metrics.jsonl"
        self._accuracy_before = accuracy
        self._totals = replace(self._totals, accuracy_before=accuracy)
        self.note(f"accuracy before training: {percent(accuracy)}")
        if self._tensorboard_enabled:
            self._event_writer().add_scalar(metric_names.ACCURACY, accuracy, 0)
        if self._wandb is not None:
            self._wandb.log({metric_names.ACCURACY: accuracy}, steps_done=0)

    def step(self, record: StepRecord) -> None:
        """Log a step.

        Raises: RuntimeError where the directory holds steps of an earlier run and ``resume_from`` was not
        called.
        """
        assert record.step == self._next_step, f"step {record.step} after step {self._next_step - 1}"
        if self._accuracy_before is not None:
            extra = (*record.extra, (metric_names.ACCURACY_BEFORE, self._accuracy_before))
            record = replace(record, extra=extra)
            self._accuracy_before = None
        metrics = self._metrics_file()
        metrics.write(record.to_json() + "\n")
        metrics.flush()
        self._totals = self._totals.with_step(record)
        self._warn_of_non_finite(record)
        self._tell_of_idle_updates(record)
        if self._tensorboard_enabled:
            writer = self._event_writer()
            for name, value in record.metrics().items():
                writer.add_scalar(name, value, record.step + 1)
        if self._wandb is not None:
            self._wandb.log(record.metrics(), steps_done=record.step + 1)
        self._console.step(record)
        self._next_step += 1

    def note(self, text: str) -> None:
        """Tell the reader something once, between the steps' lines."""
        self._keep(Message(self._next_step, "note", text, text))
        self._console.note(text)

    def warn(self, kind: str, text: str) -> None:
        """Warn of something that may repeat: the console says the first of a kind, and their number at the end."""
        if all(earlier.kind != kind for earlier in self._messages):
            self._console.note(f"warning: {text}")
        self._keep(Message(self._next_step, "warning", kind, text))

    def _keep(self, message: Message) -> None:
        self._messages.append(message)
        append_message(self._directory, message)

    def summary(self) -> None:
        """Write summary.json and the closing block, over all steps of the run and its restarts."""
        summary = SummaryRecord.from_totals(self._totals, run_directory=str(self._directory))
        atomic_write_text(self._directory / SUMMARY_FILE, summary.to_json())
        self._console.summary(summary)
        warnings = [message for message in self._messages if message.level == "warning"]
        repeated = [group for group in grouped(warnings) if group.count > 1]
        if repeated:
            lines = [f"  {group.count:,} times, steps {group.first}-{group.last}: {group.text}" for group in repeated]
            self._console.note("\n".join(["warnings that came more than once", *lines]))

    def close(self) -> None:
        """Close the files and give the terminal back; closing twice is harmless."""
        self._tap.detach()
        self._console.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None

    def __enter__(self) -> Self:
        self._tap.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _metrics_file(self) -> TextIOWrapper:
        if self._metrics is None:
            path = self._directory / METRICS_FILE
            if self._next_step == 0 and path.exists() and path.stat().st_size:
                raise RuntimeError(f"{path} holds an earlier run; resume it, or log to an empty directory")
            self._metrics = path.open("a", encoding="utf-8")
        return self._metrics

    def _event_writer(self) -> "SummaryWriter":
        if self._tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            # Purging hides the events of steps that a resumed run makes again.
            purge_step = self._next_step + 1 if self._next_step else 0
            log_dir = str(self._directory / TENSORBOARD_DIRECTORY)
            self._tensorboard = SummaryWriter(log_dir, purge_step=purge_step)
        return self._tensorboard

    def _warn_of_non_finite(self, record: StepRecord) -> None:
        names = {name for name, value in record.metrics().items() if not math.isfinite(value)}
        new = names - self._non_finite
        self._non_finite |= names
        if new:
            names_listed = ", ".join(sorted(new))
            self.warn(
                f"not finite: {names_listed}", f"step {record.step + 1}: not finite, logged as null: {names_listed}"
            )

    def _tell_of_idle_updates(self, record: StepRecord) -> None:
        if idle := dict(record.extra).get(metric_names.IDLE_UPDATES):
            steps = "1 optimizer step" if idle == 1 else f"{idle:.0f} optimizer steps"
            self.note(f"step {record.step + 1}: {steps} not taken: nothing that was kept has a gradient")


class SilentLog:
    """The log of every rank but 0: the same verbs, nothing written."""

    def resume_from(self, step: int) -> None:
        """Nothing."""

    def baseline(self, accuracy: float) -> None:
        """Nothing."""

    def step(self, record: StepRecord) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def warn(self, kind: str, text: str) -> None:
        """Nothing."""

    def summary(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _set_aside(path: Path) -> Path:
    """Move a file into the first directory earlier_N beside it that is not there yet, where dppo report reads it."""
    numbers = itertools.count(1)
    directory = next(each for each in (path.parent / f"earlier_{n}" for n in numbers) if not each.exists())
    directory.mkdir()
    return path.rename(directory / path.name)


def read_metrics(path: Path) -> list[tuple[str, StepRecord]]:
    """Lines of metrics.jsonl with their steps; a last line cut short is left out.

    Raises: RuntimeError for any other line that is not a step's.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # the run died while writing it
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append((line, StepRecord.from_json(line)))
        except ValueError as error:
            raise RuntimeError(f"{path}:{number} is not a step's line: {error}") from error
    return records
