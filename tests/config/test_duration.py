"""Claims about durations."""

import pytest

from dppo_megatron.config.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:03:45:00", 13500), ("03:45:00", 13500), ("1:00:00:01", 86401), ("00:00:00", 0)]
)
def test_a_duration_is_days_hours_minutes_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "3600", "1h", "00:00", "-1:00:00", "1:2:3:4:5"])
def test_any_other_text_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="DD:HH:MM:SS"):
        parse_duration(text)
