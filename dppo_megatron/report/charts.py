"""Line charts and stacked bars as SVG text, drawn here: the page needs no network and no library."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

Format = Literal["number", "percent", "seconds"]

_WIDTH, _HEIGHT = 560, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 28
_MAX_POINTS = 300
_MAX_BARS = 60
_NUM_COLOURS = 8


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points with a common name; a y that is not finite is left out.

    x: rising. faint: drawn thin and pale, behind a smoothed line of the same quantity. dots: single measurements.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    faint: bool = False
    dots: bool = False

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y)

    def finite(self) -> "Series":
        """The points whose y is a number."""
        points = [(x, y) for x, y in zip(self.x, self.y, strict=True) if math.isfinite(y)]
        return Series(self.name, tuple(x for x, _ in points), tuple(y for _, y in points), self.faint, self.dots)

    def thinned(self, limit: int = _MAX_POINTS) -> "Series":
        """At most ``limit`` points: means over neighbours."""
        size = -(-len(self.x) // limit)
        if size <= 1:
            return self
        starts = range(0, len(self.x), size)
        x = tuple(_mean(self.x[start : start + size]) for start in starts)
        y = tuple(_mean(self.y[start : start + size]) for start in starts)
        return Series(self.name, x, y, self.faint, self.dots)

    def smoothed(self, window: int) -> "Series":
        """Means over the last ``window`` points (fewer at the start)."""
        y = tuple(_mean(self.y[max(0, i + 1 - window) : i + 1]) for i in range(len(self.y)))
        return Series(self.name, self.x, y)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True, slots=True)
class Axis:
    """A value range and its picture: pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], *, start: float, end: float, include: Sequence[float] = ()) -> "Axis":
        """The range of the values, widened where it is empty."""
        low, high = min([*values, *include]), max([*values, *include])
        if low == high:
            margin = abs(low) * 0.1 or 0.5
            low, high = (0.0, high + margin) if low >= 0 else (low - margin, high + margin)
        return cls(low, high, start, end)

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int = 4) -> list[float]:
        """Round values within the range, about ``count`` of them."""
        raw = (self.high - self.low) / count
        scale = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= raw * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def say(value: float, form: Format) -> str:
    """A value as a short text."""
    if form == "percent":
        return f"{100 * value:.3g}%"
    text = _short(value)
    return f"{text}s" if form == "seconds" else text


def _short(value: float) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:.4g}"


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    note: str = "",
    x_name: str = "step",
    form: Format = "number",
    include: Sequence[float] = (),
) -> str:
    """A figure with one line a series, or an empty text where no series has a point.

    include: values that the vertical axis must show. note: one sentence on what is drawn.
    """
    drawn = [one.finite().thinned() for one in series]
    drawn = [one for one in drawn if one.x]
    if not drawn:
        return ""
    x = Axis.over([v for one in drawn for v in one.x], start=_LEFT, end=_WIDTH - _RIGHT)
    y = Axis.over([v for one in drawn for v in one.y], start=_HEIGHT - _BOTTOM, end=_TOP, include=include)
    colours = _colours(drawn)
    body = [_grid(x, y, x_name=x_name, form=form)]
    body += [_line(one, x, y, colour=colours[one.name]) for one in sorted(drawn, key=lambda one: not one.faint)]
    hover = [
        {
            "n": one.name,
            "c": colours[one.name],
            "p": [[_plot(x(a)), _plot(y(b)), _short(a), say(b, form)] for a, b in zip(one.x, one.y, strict=True)],
        }
        for one in drawn
        if not one.faint
    ]
    legend = _legend([(one.name, colours[one.name]) for one in drawn if not one.faint]) if len(hover) > 1 else ""
    return _figure(title, note=note, legend=legend, body="".join(body), hover=json.dumps(hover))


def _colours(series: Sequence[Series]) -> dict[str, int]:
    names = list(dict.fromkeys(one.name for one in series))
    return {name: number % _NUM_COLOURS for number, name in enumerate(names)}


def _plot(value: float) -> float:
    return round(value, 1)


def _grid(x: Axis, y: Axis, *, x_name: str, form: Format) -> str:
    parts = []
    for tick in y.ticks():
        at = _plot(y(tick))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{at + 3.5}" text-anchor="end">{say(tick, form)}</text>')
    for tick in x.ticks(5):
        at = _plot(x(tick))
        parts.append(f'<text class="tick" x="{at}" y="{_HEIGHT - 12}" text-anchor="middle">{_short(tick)}</text>')
    parts.append(
        f'<text class="tick" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 1}" text-anchor="end">{escape(x_name)}</text>'
    )
    return "".join(parts)


def _line(series: Series, x: Axis, y: Axis, *, colour: int) -> str:
    points = [(_plot(x(a)), _plot(y(b))) for a, b in zip(series.x, series.y, strict=True)]
    kind = "line faint" if series.faint else "line"
    path = f'<polyline class="{kind} c{colour}" points="{" ".join(f"{a},{b}" for a, b in points)}"/>'
    if series.dots or len(points) == 1:
        path += "".join(f'<circle class="dot c{colour}" cx="{a}" cy="{b}" r="3.5"/>' for a, b in points)
    return path


def _legend(entries: Sequence[tuple[str, int]]) -> str:
    items = (f'<span><i class="key c{colour}"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<div class="legend">{"".join(items)}</div>'


def _figure(title: str, *, note: str, legend: str, body: str, hover: str) -> str:
    caption = f"<figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>"
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}" '
        f'data-hover="{escape(hover)}">{body}</svg>'
    )
    return f"<figure>{caption}{legend}{svg}</figure>"


def stacked_bars(
    stacks: Sequence[Series], *, title: str, note: str = "", x_name: str = "step", form: Format = "seconds"
) -> str:
    """A figure of bars, each the stack of all series at one x; all series share their x; empty without points."""
    if not stacks or not stacks[0].x:
        return ""
    thin = [one.thinned(_MAX_BARS) for one in stacks]
    assert len({one.x for one in thin}) == 1, "stacked series must share their x"
    totals = [sum(one.y[i] for one in thin) for i in range(len(thin[0].x))]
    y = Axis.over(totals, start=_HEIGHT - _BOTTOM, end=_TOP, include=(0.0,))
    slot = (_WIDTH - _RIGHT - _LEFT) / len(totals)
    first, last = thin[0].x[0], thin[0].x[-1]
    x = Axis(first, last, _LEFT + slot / 2, _WIDTH - _RIGHT - slot / 2) if last > first else None
    body = [_grid(x or Axis(first - 0.5, first + 0.5, _LEFT, _WIDTH - _RIGHT), y, x_name=x_name, form=form)]
    width = _plot(min(slot * 0.85, 40))
    for i in range(len(totals)):
        bottom, rows = 0.0, [f"{x_name} {_short(thin[0].x[i])}: {say(totals[i], form)}"]
        centre = _LEFT + slot * (i + 0.5)
        for colour, one in enumerate(thin):
            rows.append(f"{one.name} {say(one.y[i], form)}")
            height = y(bottom) - y(bottom + one.y[i])
            if height >= 0.2:
                at, top = _plot(centre - width / 2), _plot(y(bottom + one.y[i]))
                body.append(
                    f'<rect class="bar c{colour % _NUM_COLOURS}" x="{at}" y="{top}" width="{width}" '
                    f'height="{round(height, 1)}"/>'
                )
            bottom += one.y[i]
        body.append(
            f'<rect class="hit" x="{_plot(centre - slot / 2)}" y="{_TOP}" width="{_plot(slot)}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}"><title>{escape(chr(10).join(rows))}</title></rect>'
        )
    legend = _legend([(one.name, number % _NUM_COLOURS) for number, one in enumerate(thin)])
    return _figure(title, note=note, legend=legend, body="".join(body), hover="[]")
