"""What a run's directory tells, read while the run goes on or after it."""

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.config_origins import Setting, read_settings
from dppo_megatron.provenance import PROVENANCE_FILE
from dppo_megatron.report.charts import Series
from dppo_megatron.rl.replay import Sample, iterate_samples
from dppo_megatron.run_log import METRICS_FILE, read_metrics
from dppo_megatron.run_messages import MessageGroup, grouped, read_messages
from dppo_megatron.run_records import StepRecord, SummaryRecord, Totals

_SAMPLES = re.compile(r"step_(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run. command: the command line. layout, versions: (name, value)."""

    time: str
    first_step: int
    command: tuple[str, ...]
    world_size: int
    layout: tuple[tuple[str, int], ...]
    versions: tuple[tuple[str, str], ...]
    commit: str


@dataclass(frozen=True, slots=True)
class RunData:
    """A run as its directory tells it.

    metrics: what each step logged. sample_files: (step of the loop, file), rising.
    """

    directory: Path
    steps: tuple[StepRecord, ...]
    metrics: tuple[Mapping[str, float], ...]
    settings: tuple[Setting, ...]
    starts: tuple[Start, ...]
    messages: tuple[MessageGroup, ...]
    sample_files: tuple[tuple[int, Path], ...]

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.directory.resolve().name

    @property
    def num_steps(self) -> int | None:
        """Steps that the configuration asks for, where it is known."""
        wanted = self.setting("grpo.max_num_steps")
        return int(wanted) if wanted and wanted.isdigit() else None

    def setting(self, key: str) -> str | None:
        """A value of the configuration as text, None where the run has none of that key."""
        return next((one.value for one in self.settings if one.key == key), None)

    def summary(self) -> SummaryRecord:
        """Totals over the steps so far."""
        totals = Totals()
        for record in self.steps:
            totals = totals.with_step(record)
        return SummaryRecord.from_totals(totals, run_directory=str(self.directory))

    def metric_names(self) -> tuple[str, ...]:
        """Every metric that any step logged, in the order of first appearance."""
        return tuple(dict.fromkeys(name for values in self.metrics for name in values))

    def metric(self, name: str, *, label: str = "") -> Series:
        """One metric over the steps done; only the steps that logged it."""
        logged = zip(self.steps, self.metrics, strict=True)
        points = [(record.step + 1.0, values[name]) for record, values in logged if name in values]
        return Series(label or name, tuple(x for x, _ in points), tuple(float(y) for _, y in points))

    def samples(self, path: Path, *, max_groups: int) -> list[list[Sample]]:
        """The first groups of a step's samples: files are sorted by prompt id, a hash, so these are no selection."""
        groups = itertools.groupby(iterate_samples(path), key=lambda sample: (sample.prompt_id, sample.occurrence))
        return [list(group) for _, group in itertools.islice(groups, max_groups)]


def read_run(directory: Path) -> RunData:
    """Read a run's directory.

    Raises: ValueError where it holds no metrics.jsonl with a step in it.
    """
    path = directory / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"RUN: {directory} has no {METRICS_FILE}; name the directory of a run (its logger.log_dir)")
    steps = tuple(record for _, record in read_metrics(path))
    if not steps:
        raise ValueError(f"RUN: {path} holds no step yet")
    settings = read_settings(directory)
    recorded = next((one.value for one in settings if one.key == "dppo.rollout.record_dir"), "null")
    return RunData(
        directory=directory,
        steps=steps,
        metrics=tuple(record.metrics() for record in steps),
        settings=settings,
        starts=_read_starts(directory / PROVENANCE_FILE),
        messages=grouped(read_messages(directory)),
        sample_files=_find_samples(directory, recorded),
    )


def _find_samples(directory: Path, recorded: str) -> tuple[tuple[int, Path], ...]:
    # A run that was moved has its samples where it is now, if it recorded into its own directory.
    for folder in (directory / "samples", Path(recorded) / "samples"):
        named = ((_SAMPLES.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
        if found := sorted((int(match[1]), path) for match, path in named if match):
            return tuple(found)
    return ()


def _read_starts(path: Path) -> tuple[Start, ...]:
    if not path.is_file():
        return ()
    starts: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["starts"]
    return tuple(
        Start(
            time=start["started"],
            first_step=start["first_step"],
            command=tuple(start["command"]),
            world_size=start["world_size"],
            layout=tuple(start["layout"].items()),
            versions=tuple(start["versions"].items()),
            commit=(start["git"]["commit"] + (" with changes" if start["git"]["dirty"] else ""))
            if start["git"]
            else "",
        )
        for start in starts
    )
