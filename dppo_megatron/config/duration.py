"""Durations as NeMo-RL writes them."""

import re

_DURATION = re.compile(r"(?:(\d+):)?(\d+):(\d+):(\d+)")


def parse_duration(text: str) -> float:
    """Seconds of ``DD:HH:MM:SS`` or ``HH:MM:SS``, NeMo-RL's form; ValueError for anything else."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("must be DD:HH:MM:SS or HH:MM:SS, counted from the start of the run")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
