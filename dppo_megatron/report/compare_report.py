"""A comparison of runs, as text and as an HTML page."""

from collections.abc import Callable

from dppo_megatron import metric_names
from dppo_megatron.live_table import clock_time, percent
from dppo_megatron.report.charts import line_chart
from dppo_megatron.report.comparison import ABSENT, Comparison, Spent, accuracy_over
from dppo_megatron.report.grid import Grid
from dppo_megatron.report.page import Section, charts, page, table
from dppo_megatron.report.run_data import RunData


def comparison_text(comparison: Comparison) -> str:
    """The comparison for a terminal."""
    return "\n\n".join(grid.text() for grid in _grids(comparison)) + "\n"


def comparison_page(comparison: Comparison) -> str:
    """The comparison as a self-contained page."""
    totals, *rest = _grids(comparison)
    sections = [Section("Totals", _html(totals)), Section("Curves", _curves(comparison))]
    sections += [Section(grid.title, _html(grid)) for grid in rest]
    return page("Comparison of runs", subtitle=", ".join(comparison.names), sections=sections)


def _html(grid: Grid) -> str:
    numeric = () if grid.headings[0] == "key" else range(1, len(grid.headings))
    return table(grid.headings, grid.rows, numeric=tuple(numeric))


def _grids(comparison: Comparison) -> list[Grid]:
    grids = [_totals(comparison)]
    if comparison.target is not None:
        grids.append(_to_target(comparison, comparison.target))
    rows = tuple((one.key, *one.values) for one in comparison.differences)
    if rows:
        grids.append(Grid("Differences in configuration", ("key", *comparison.names), rows))
    return grids


def _totals(comparison: Comparison) -> Grid:
    rows = []
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        summary = run.summary()
        rows.append(
            (
                name,
                f"{summary.steps:,}",
                percent(summary.accuracy_before),
                percent(summary.accuracy_after),
                f"{summary.rollout_tokens:,}",
                f"{summary.train_tokens:,}",
                percent(summary.train_tokens_saved_fraction),
                clock_time(summary.train_seconds),
            )
        )
    headings = ("run", "steps", "before", "after", "sampled tokens", "trained tokens", "saved", "training time")
    return Grid("Totals", headings, tuple(rows))


_COSTS: tuple[tuple[str, Callable[[Spent], float], str], ...] = (
    ("steps", lambda spent: spent.steps, "{:,.0f}"),
    ("seconds", lambda spent: spent.seconds, "{:,.1f}"),
    ("sampled tokens", lambda spent: spent.rollout_tokens, "{:,.0f}"),
    ("trained tokens", lambda spent: spent.train_tokens, "{:,.0f}"),
)


def _to_target(comparison: Comparison, target: float) -> Grid:
    """Costs of the first validation at or above the target, each with the first run's over this run's."""
    first = comparison.reached[0]
    rows = []
    for name, spent in zip(comparison.names, comparison.reached, strict=True):
        row = [name]
        for _, cost, form in _COSTS:
            row.append(ABSENT if spent is None else form.format(cost(spent)))
            row.append(_ratio(first, spent, cost))
        rows.append(tuple(row))
    headings = ["run"]
    for name, _, _ in _COSTS:
        headings += [name, "ratio"]
    title = f"To {percent(target)} validation accuracy (ratio: {comparison.names[0]} / this run)"
    return Grid(title, tuple(headings), tuple(rows))


def _ratio(first: Spent | None, spent: Spent | None, cost: Callable[[Spent], float]) -> str:
    if first is None or spent is None or not cost(spent):
        return ABSENT
    return f"{cost(first) / cost(spent):.2f}x"


def _curves(comparison: Comparison) -> str:
    figures = [
        line_chart(
            [accuracy_over(run, field, name=name) for run, name in _named(comparison)],
            title=f"Accuracy over {label}",
            x_name=label,
            form="percent",
            include=(0, 1),
        )
        for field, label in (
            ("steps", "steps"),
            ("tokens", "sampled and trained tokens"),
            ("seconds", "training seconds"),
        )
    ]
    for title, metric in (
        ("Reward", metric_names.REWARD),
        ("Completions kept", metric_names.KEPT_FRACTION),
        ("Gradient norm", metric_names.GRAD_NORM),
        ("Completion length", metric_names.MEAN_GENERATED_TOKENS),
    ):
        lines = [run.metric(metric, label=name) for run, name in _named(comparison)]
        smooth = [line.finite().smoothed(max(1, len(line.x) // 30)) for line in lines if line.x]
        figures.append(line_chart(smooth, title=title, note="smoothed"))
    return charts(figures)


def _named(comparison: Comparison) -> list[tuple[RunData, str]]:
    return list(zip(comparison.runs, comparison.names, strict=True))
