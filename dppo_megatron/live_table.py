"""How a run looks to a person: cells of a step, the live table, the closing block."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dppo_megatron import metric_names
from dppo_megatron.run_records import StepRecord, SummaryRecord, Totals
from dppo_megatron.stage_clock import StageSeconds

# Heading and width; with a space between columns a line fits 80.
COLUMNS = (
    ("step", 11),
    ("reward", 7),
    ("accuracy", 8),
    ("kept", 6),
    ("train tok", 9),
    ("tok/s", 8),
    ("saved", 6),
    ("seconds", 8),
    ("left", 8),
)
_BAR_WIDTH = 30


def cells(record: StepRecord, *, totals: Totals, num_steps: int, seconds_left: float) -> tuple[str, ...]:
    """One step's cells, in the order of COLUMNS; tokens are shortened, ``left`` is h:mm:ss.

    tok/s: completion tokens sampled, over the step without validation and checkpoints. saved: of the training
    tokens, over all of ``totals``.
    """
    seconds = record.stage_seconds.training
    return (
        f"{record.step + 1}/{num_steps}",
        f"{record.reward:.3f}",
        percent(record.accuracy),
        percent(record.kept_fraction),
        short_count(record.train_tokens),
        short_count(round(record.rollout_tokens / seconds)) if seconds > 0 else "-",
        percent(_saved(totals.train_tokens, totals)),
        short_seconds(record.stage_seconds.total),
        clock_time(seconds_left),
    )


def _saved(tokens: int, totals: Totals) -> float:
    full = totals.train_tokens_without_pruning
    return 1 - tokens / full if full else 0.0


def live_table(
    rows: Sequence[tuple[str, ...]], *, recent: Sequence[StepRecord], totals: Totals, num_steps: int
) -> RenderableType:
    """The terminal's picture: the recent steps, progress, where their time went, how fast, what was saved."""
    steps_done = recent[-1].step + 1
    seconds = sum((record.stage_seconds for record in recent), StageSeconds())
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading, width in COLUMNS:
        table.add_column(heading, justify="right", width=width, no_wrap=True)
    for row in rows[:-1]:
        table.add_row(*row, style="dim")
    for row in rows[-1:]:
        table.add_row(*row)
    progress = Table.grid(padding=(0, 1, 0, 0))
    progress.add_row(
        Text(f"{steps_done}/{num_steps}", "bold"),
        ProgressBar(total=num_steps, completed=steps_done, width=_BAR_WIDTH),
        Text(f"{rows[-1][-1]} left" if rows else "", "bold"),
    )
    lines = (stage_shares(seconds), speeds(recent), savings(totals))
    footer = [Text(line, "cyan", overflow="ellipsis", no_wrap=True) for line in lines if line]
    return Group(table, Text(""), progress, *footer)


def speeds(recent: Sequence[StepRecord]) -> str:
    """Tokens a second by stage, model operations a second and their share of the peak, over the recent steps."""

    def mean(name: str) -> float | None:
        values = [value for record in recent for key, value in record.extra if key == name]
        return sum(values) / len(values) if values else None

    parts = []
    for label, name in (
        ("rollout", metric_names.ROLLOUT_TOKENS_PER_SECOND),
        ("training", metric_names.TRAIN_TOKENS_PER_SECOND),
        ("whole", metric_names.TOKENS_PER_SECOND),
    ):
        if (rate := mean(name)) is not None:
            parts.append(f"{label} {short_count(round(rate))} tok/s")
    if (flops := mean(metric_names.TRAIN_FLOPS_PER_SECOND)) is not None:
        utilisation = mean(metric_names.TRAIN_UTILISATION)
        share = "" if utilisation is None else f" ({percent(utilisation)} of peak)"
        parts.append(f"{short_count(round(flops))}FLOP/s{share}")
    return "  ".join(parts)


def savings(totals: Totals) -> str:
    """What pruning saved so far."""
    trained, sampled = (percent(_saved(tokens, totals)) for tokens in (totals.train_tokens, totals.rollout_tokens))
    return f"saved so far: {trained} of training tokens, {sampled} of sampled tokens"


def stage_shares(seconds: StageSeconds) -> str:
    """The stages that took a percent or more of the time, longest first, on one line."""
    shares = sorted(seconds.shares().items(), key=lambda item: -item[1])
    return "  ".join(f"{stage} {share:.0%}" for stage, share in shares if share >= 0.01)


def closing_block(summary: SummaryRecord, *, bar: str) -> tuple[str, ...]:
    """The run's last lines: accuracy, tokens spent and saved, time by stage, where the files lie.

    bar: the character that the bars are made of.
    """
    rolled, trained = summary.rollout_tokens, summary.train_tokens
    full = summary.train_tokens_without_pruning
    lines = [
        "",
        f"accuracy        {percent(summary.accuracy_before)} -> {percent(summary.accuracy_after)}",
        f"steps           {summary.steps:,}",
        f"tokens sampled  {rolled:,} of {full:,}: {full - rolled:,} saved"
        f" ({percent(summary.rollout_tokens_saved_fraction)})",
        f"tokens trained  {trained:,} of {full:,}: {full - trained:,} saved"
        f" ({percent(summary.train_tokens_saved_fraction)})",
        f"dropped         {percent(summary.completions_dropped_fraction)} of completions,"
        f" {percent(summary.prompts_dropped_fraction)} of prompts",
    ]
    if summary.non_finite:
        lines.append(f"not finite      {summary.non_finite:,} logged values (null in metrics.jsonl)")
    lines.append(
        f"time            {clock_time(summary.stage_seconds.total)},"
        f" of it training {clock_time(summary.train_seconds)}"
    )
    longest = max(seconds for _, seconds in summary.stage_seconds.items())
    timed = zip(summary.stage_seconds.items(), summary.stage_shares.items(), strict=True)
    for (stage, seconds), (_, share) in timed:
        if seconds > 0:
            length = max(1, round(_BAR_WIDTH * seconds / longest))
            lines.append(f"  {stage:<12}{short_seconds(seconds):>9}{percent(share):>8}  {bar * length}")
    return (*lines, f"run directory   {summary.run_directory}")


def percent(fraction: float | None) -> str:
    """A fraction as a percentage with one decimal, a dash where there is none."""
    return "-" if fraction is None else f"{100 * fraction:.1f}%"


def short_count(count: int) -> str:
    """A count, shortened from 10,000 on: 9500, 12.3k, 4.5M."""
    for limit, scale, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if count >= limit:
            return f"{count / scale:.1f}{unit}"
    return str(count)


def short_seconds(seconds: float) -> str:
    """Seconds with as many decimals as tell something."""
    return f"{seconds:.3f}s" if seconds < 1 else f"{seconds:.1f}s"


def clock_time(seconds: float) -> str:
    """A duration as h:mm:ss, rounded up to a second."""
    whole = -int(-seconds // 1)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
