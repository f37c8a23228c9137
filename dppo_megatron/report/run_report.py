"""The HTML report of one run."""

import math
from html import escape
from pathlib import Path

from dppo_megatron import metric_names
from dppo_megatron.atomic_file import atomic_write_text
from dppo_megatron.config_origins import DEFAULT
from dppo_megatron.live_table import clock_time, percent, short_count, short_seconds
from dppo_megatron.report.charts import Format, Series, line_chart, stacked_bars
from dppo_megatron.report.page import Section, charts, page, table, tiles
from dppo_megatron.report.run_data import RunData, read_run
from dppo_megatron.report.sample_browser import sample_browser
from dppo_megatron.run_records import SummaryRecord

REPORT_FILE = "report.html"

_SMOOTHING_SHARE = 30  # a smoothed curve averages this fraction of the run
_SMALL_STAGE = 0.01  # of the time: stages below it are drawn as one


def write_report(directory: Path, *, output: Path | None = None) -> Path:
    """Write the report of the run in ``directory``, by default as report.html there; returns its path.

    Raises: ValueError where there is no run.
    """
    path = output or directory / REPORT_FILE
    atomic_write_text(path, run_report(read_run(directory)))
    return path


def run_report(run: RunData) -> str:
    """The page's text."""
    drawn: set[str] = set()
    summary = run.summary()
    sections = [
        Section("Summary", _tiles(run, summary)),
        Section("Messages", _messages(run)),
        Section("Learning", _learning(run, drawn)),
        Section("Pruning", _pruning(run, drawn)),
        Section("Audit", _audit(run, drawn)),
        Section("Time", _time(run, summary, drawn)),
        Section("Rollouts and packing", _rollouts(run, drawn)),
        Section("Samples", sample_browser(run)),
        Section("Everything else", _rest(run, drawn)),
        Section("Configuration", _configuration(run)),
        Section("Provenance", _provenance(run)),
    ]
    done = run.steps[-1].step + 1
    state = f"{done:,} of {run.num_steps:,} steps" if run.num_steps else f"{done:,} steps"
    model = run.setting("policy.model_name") or ""
    return page(run.name, subtitle=" · ".join(text for text in (model, state) if text), sections=sections)


def _tiles(run: RunData, summary: SummaryRecord) -> str:
    tokens = summary.rollout_tokens / summary.train_seconds if summary.train_seconds else 0.0
    total = summary.stage_seconds.total
    entries = [
        (f"{percent(summary.accuracy_before)} → {percent(summary.accuracy_after)}", "validation accuracy"),
        (f"{run.steps[0].reward:.3f} → {run.steps[-1].reward:.3f}", "mean reward of a step"),
        (percent(summary.train_tokens_saved_fraction), "training tokens saved by pruning"),
        (percent(summary.rollout_tokens_saved_fraction), "sampled tokens saved by pruning"),
        (short_count(summary.train_tokens), "tokens trained on"),
        (clock_time(total), f"wall time, {percent(summary.train_seconds / total if total else 0.0)} of it training"),
        (f"{short_count(round(tokens))}/s", "sampled tokens a second of training"),
    ]
    return tiles(entries)


def _messages(run: RunData) -> str:
    rows = [
        (
            one.level,
            one.text,
            f"{one.count:,}",
            str(one.first) if one.first == one.last else f"{one.first}-{one.last}",
        )
        for one in sorted(run.messages, key=lambda one: one.level != "warning")
    ]
    return (
        table(("", "message", "times", "steps done"), rows, numeric=(2, 3), classes=[one[0] for one in rows])
        or '<p class="sub">The run has said nothing.</p>'
    )


class _Charts:
    """Figures of metrics that exist, and a note of which were drawn."""

    def __init__(self, run: RunData, drawn: set[str]) -> None:
        self._run, self._drawn = run, drawn
        self._logged = set(run.metric_names())
        self.figures: list[str] = []

    def add(
        self,
        title: str,
        lines: tuple[tuple[str, str], ...],
        *,
        note: str = "",
        form: Format = "number",
        include: tuple[float, ...] = (),
        smooth: bool = False,
        dots: bool = False,
    ) -> None:
        """A chart of metrics, (name, label) each; those that no step logged are left out."""
        series = []
        for name, label in lines:
            if name not in self._logged:
                continue
            self._drawn.add(name)
            line = self._run.metric(name, label=label)
            if smooth and len(line.x) >= 2 * _SMOOTHING_SHARE:
                series.append(Series(label, line.x, line.y, faint=True))
                line = line.finite().smoothed(max(2, len(line.x) // _SMOOTHING_SHARE))
            series.append(Series(line.name, line.x, line.y, dots=dots))
        self.figures.append(line_chart(series, title=title, note=note, form=form, include=include))

    def html(self) -> str:
        """The figures."""
        return charts(self.figures)


def _learning(run: RunData, drawn: set[str]) -> str:
    figures = _Charts(run, drawn)
    figures.add(
        "Reward", ((metric_names.REWARD, "reward"),), note="mean over a step's completions, smoothed", smooth=True
    )
    drawn.add(metric_names.ACCURACY_BEFORE)
    accuracy = run.metric(metric_names.ACCURACY)
    before = run.metric(metric_names.ACCURACY_BEFORE)
    line = Series("accuracy", (*(0.0 for _ in before.x), *accuracy.x), (*before.y, *accuracy.y), dots=True)
    drawn.add(metric_names.ACCURACY)
    figures.figures.append(
        line_chart([line], title="Validation accuracy", note="mean validation reward", form="percent", include=(0, 1))
    )
    figures.add("Loss", ((metric_names.LOSS, "loss"),), note="the objective after its denominator", smooth=True)
    figures.add(
        "Gradient norm", ((metric_names.GRAD_NORM, "norm"),), note="before clipping", smooth=True, include=(0,)
    )
    figures.add("Learning rate", ((metric_names.LEARNING_RATE, "rate"),), include=(0,))
    figures.add(
        "Surprisal",
        ((metric_names.SURPRISAL, "surprisal"),),
        note="-log-prob of the sampled tokens, nats",
        smooth=True,
    )
    return figures.html()


def _pruning(run: RunData, drawn: set[str]) -> str:
    figures = _Charts(run, drawn)
    figures.add(
        "Kept",
        ((metric_names.KEPT_FRACTION, "completions"), (metric_names.KEPT_PROMPTS_FRACTION, "prompts")),
        note="completions trained on / sampled; prompts sampled for / candidates",
        form="percent",
        include=(0, 1),
        smooth=True,
    )
    saved = [
        Series(name, tuple(r.step + 1.0 for r in run.steps), _cumulative_saving(run, field))
        for name, field in (("training", metric_names.TRAIN_TOKENS), ("sampling", metric_names.ROLLOUT_TOKENS))
    ]
    figures.figures.append(
        line_chart(saved, title="Tokens saved so far", note="1 - tokens / tokens without pruning", form="percent")
    )
    figures.add(
        "Effective sample size",
        ((metric_names.EFFECTIVE_SAMPLE_SIZE, "completions"),),
        note="(sum of weights)² / sum of squared weights, completions",
        include=(0,),
        smooth=True,
    )
    figures.add(
        "Weights",
        ((metric_names.WEIGHT_MEAN, "mean"), (metric_names.WEIGHT_MAX, "largest")),
        note="1 / keep probability, of the kept completions",
        include=(1,),
    )
    figures.add(
        "Variance factors",
        ((metric_names.PROMPT_VARIANCE, "prompts"), (metric_names.COMPLETION_VARIANCE, "completions")),
        note="the kept fraction times the mean of 1 / p; 1 is no pruning",
        include=(1,),
    )
    return figures.html()


def _cumulative_saving(run: RunData, name: str) -> tuple[float, ...]:
    spent = full = 0.0
    values = []
    for record, metrics in zip(run.steps, run.metrics, strict=True):
        spent += metrics[name]
        full += record.train_tokens_without_pruning
        values.append(1 - spent / full if full else 0.0)
    return tuple(values)


def _audit(run: RunData, drawn: set[str]) -> str:
    figures = _Charts(run, drawn)
    figures.add(
        "Cosine",
        ((metric_names.AUDIT_COSINE, "of the step"), (metric_names.AUDIT_MEAN_COSINE, "of the running means")),
        note="estimated against full-batch gradient",
        include=(1,),
        dots=True,
    )
    figures.add(
        "Relative error",
        (
            (metric_names.AUDIT_ERROR, "of the step"),
            (metric_names.AUDIT_MEAN_ERROR, "of the running means"),
            (metric_names.AUDIT_STANDARD_ERROR, "expected of the means without bias"),
        ),
        note="of the estimated gradient",
        include=(0,),
        dots=True,
    )
    return figures.html()


def _time(run: RunData, summary: SummaryRecord, drawn: set[str]) -> str:
    drawn.update(metric_names.STAGE_SECONDS, (metric_names.STEP_SECONDS,))
    total = summary.stage_seconds.total
    large = [stage for stage, seconds in summary.stage_seconds.items() if total and seconds / total >= _SMALL_STAGE]
    large = sorted(large, key=lambda stage: -dict(summary.stage_seconds.items())[stage])[:7]
    x = tuple(record.step + 1.0 for record in run.steps)
    seconds = [dict(record.stage_seconds.items()) for record in run.steps]
    stacks = [Series(stage, x, tuple(one[stage] for one in seconds)) for stage in large if stage != "other"]
    rest = tuple(
        sum(value for stage, value in one.items() if stage == "other" or stage not in large) for one in seconds
    )
    stacks.append(Series("other", x, rest))
    figures = _Charts(run, drawn)
    figures.figures.append(
        stacked_bars(stacks, title="Seconds a step, by stage", note="means over neighbouring steps in a long run")
    )
    figures.add(
        "Tokens a second",
        (
            (metric_names.ROLLOUT_TOKENS_PER_SECOND, "rollout"),
            (metric_names.TRAIN_TOKENS_PER_SECOND, "training"),
            (metric_names.TOKENS_PER_SECOND, "whole step"),
        ),
        note="completion tokens sampled; prompt and completion tokens trained; sampled over the step",
        include=(0,),
        smooth=True,
    )
    figures.add(
        "Model FLOPs a second", ((metric_names.TRAIN_FLOPS_PER_SECOND, "update"),), note="of the update", smooth=True
    )
    figures.add("Utilisation", ((metric_names.TRAIN_UTILISATION, "update"),), form="percent", include=(0,))
    rows = [
        (stage, short_seconds(value), percent(value / total))
        for stage, value in sorted(summary.stage_seconds.items(), key=lambda item: -item[1])
        if value > 0
    ]
    shares = table(("stage", "time", "share"), rows, numeric=(1, 2))
    return figures.html() + f'<div class="card narrow">{shares}</div>'


def _rollouts(run: RunData, drawn: set[str]) -> str:
    figures = _Charts(run, drawn)
    figures.add(
        "Length",
        ((metric_names.MEAN_GENERATED_TOKENS, "completion"), (metric_names.MEAN_PROMPT_LENGTH, "prompt")),
        note="mean tokens",
        include=(0,),
    )
    figures.add(
        "Finish reasons",
        ((metric_names.TRUNCATION_RATE, "cut at the limit"),),
        note="cut at the limit of new tokens; the rest ended on a stop token",
        form="percent",
        include=(0,),
    )
    figures.add(
        "Trainer against sampler",
        ((metric_names.SAMPLER_MISMATCH, "mean ratio error"), (metric_names.GEN_KL_ERROR, "KL, nats a token")),
        note="of the sampled tokens' log-probs; 0 is equal",
        include=(0,),
    )
    figures.add(
        "Packing density",
        ((metric_names.TOKEN_DENSITY, "density"),),
        note="tokens / tokens with padding",
        form="percent",
        include=(0, 1),
    )
    figures.add(
        "Imbalance",
        ((metric_names.TOKEN_IMBALANCE, "imbalance"),),
        note="most over mean of the ranks' tokens",
        include=(1,),
    )
    figures.add(
        "Tokens a step",
        (
            (metric_names.TRAIN_TOKENS_WITHOUT_PRUNING, "without pruning"),
            (metric_names.ROLLOUT_TOKENS, "sampled"),
            (metric_names.TRAIN_TOKENS, "trained"),
        ),
        note="completion tokens",
        include=(0,),
        smooth=True,
    )
    return figures.html()


def _rest(run: RunData, drawn: set[str]) -> str:
    figures = _Charts(run, drawn)
    constant = []
    for name in run.metric_names():
        if name in drawn:
            continue
        values = {value for value in run.metric(name).y if math.isfinite(value)}
        if len(values) > 1:
            figures.add(name, ((name, name),))
        else:
            constant.append((name, f"{values.pop():.4g}" if values else "not finite"))
    return figures.html() + table(("constant in every step", "value"), constant, numeric=(1,))


def _configuration(run: RunData) -> str:
    if not run.settings:
        return ""
    rows = [(one.key, one.value, one.origin) for one in run.settings]
    classes = [DEFAULT if one.origin == DEFAULT else "set" for one in run.settings]
    toggle = (
        '<p><label><input type="checkbox" id="config-all"> show the values left at their defaults too</label></p>'
    )
    return toggle + table(("key", "value", "from"), rows, classes=classes)


def _provenance(run: RunData) -> str:
    rows = [
        (
            one.time,
            str(one.first_step + 1),
            " ".join(one.command),
            f"{one.world_size}: " + ", ".join(f"{axis} {size}" for axis, size in one.layout),
            one.commit,
        )
        for one in run.starts
    ]
    versions = dict(pair for start in run.starts for pair in start.versions)
    body = table(("started", "first step", "command", "processes", "commit"), rows, numeric=(1,))
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return body + (f'<p class="sub">{escape(listed)}</p>' if listed else "")
