"""The section ``dppo.reward`` of the configuration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RewardConfig:
    """``dppo.reward``: null takes the data set's ``env_name``; else exact_match, math or module:function.

    num_workers, memory_gb: processes of a function of the user's on each rank, and each one's address space.
    """

    function: str | None = None
    num_workers: int = 1
    memory_gb: float | None = None
    time_limit_seconds: float = 5.0
    max_answer_chars: int = 4096
