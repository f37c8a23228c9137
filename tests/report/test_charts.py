import itertools
import math
import re

import pytest

from dppo_megatron.report.charts import Axis, Series, line_chart, say, stacked_bars


def coordinates(svg: str) -> list[tuple[float, float]]:
    (points,) = re.findall(r'<polyline class="line c0" points="([^"]*)"', svg)
    return [tuple(map(float, point.split(","))) for point in points.split()]  # pyright: ignore[reportReturnType]


def test_a_line_runs_through_its_points_to_scale() -> None:
    svg = line_chart([Series("a", (0.0, 1.0, 4.0), (0.0, 10.0, 5.0))], title="t")
    (x0, y0), (x1, y1), (x2, y2) = coordinates(svg)
    assert (x1 - x0) / (x2 - x0) == pytest.approx(1 / 4, abs=1e-3)
    assert (y0 - y2) / (y0 - y1) == pytest.approx(1 / 2, abs=1e-3)


def test_what_is_not_finite_is_left_out_and_nothing_else() -> None:
    svg = line_chart([Series("a", (0.0, 1.0, 2.0), (1.0, math.nan, 3.0))], title="t")
    assert len(coordinates(svg)) == 2
    assert "nan" not in svg
    assert line_chart([Series("a", (1.0,), (math.inf,))], title="t") == ""


def test_a_long_run_is_thinned_to_means() -> None:
    line = Series("a", tuple(map(float, range(1000))), tuple(float(i % 2) for i in range(1000))).thinned(100)
    assert len(line.x) == 100
    assert line.y == pytest.approx([0.5] * 100)
    assert line.x[0] == pytest.approx(4.5)


def test_smoothing_is_the_mean_of_the_last_points() -> None:
    assert Series("a", (1.0, 2.0, 3.0), (1.0, 3.0, 8.0)).smoothed(2).y == (1.0, 2.0, 5.5)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-0.3, 0.07), (1e-9, 3e-9), (0.0, 12345.0), (5.0, 5.0)])
def test_ticks_are_round_few_and_within(low: float, high: float) -> None:
    axis = Axis.over([low, high], start=0, end=100)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 6
    assert all(axis.low - 1e-12 <= tick <= axis.high * (1 + 1e-9) for tick in ticks)
    steps = {float(f"{b - a:.6g}") for a, b in itertools.pairwise(ticks)}
    assert {float(f"{step:e}".split("e")[0]) for step in steps} <= {1.0, 2.0, 2.5, 5.0}


def test_stacks_are_as_high_as_their_sums() -> None:
    x = (1.0, 2.0)
    svg = stacked_bars([Series("a", x, (1.0, 2.0)), Series("b", x, (3.0, 2.0))], title="t")
    heights = [float(h) for h in re.findall(r'class="bar c\d" [^>]*height="([\d.]+)"', svg)]
    assert heights[0] + heights[1] == pytest.approx(heights[2] + heights[3], abs=0.3)
    assert heights[1] / heights[0] == pytest.approx(3, rel=0.02)


def test_names_are_escaped() -> None:
    svg = line_chart([Series("<b>", (1.0, 2.0), (1.0, 2.0)), Series("c", (1.0,), (2.0,))], title="<i>", note='"&')
    assert "<b>" not in svg
    assert "<i>" not in svg
    assert "&lt;b&gt;" in svg


def test_values_are_said_short() -> None:
    assert [say(0.5, "percent"), say(12345.0, "number"), say(2.5, "seconds"), say(3.1e9, "number")] == [
        "50%",
        "12.3k",
        "2.5s",
        "3.1G",
    ]
