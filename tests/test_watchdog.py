"""Claims about runs that hang."""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

from dppo_megatron.config.schema import WatchdogConfig
from dppo_megatron.watchdog import EXIT_STALLED, PARENT, Watchdog

RANK = """
import sys, time
from pathlib import Path
from dppo_megatron.config.schema import WatchdogConfig
from dppo_megatron.watchdog import Watchdog

def stuck_in_here():
    time.sleep(60)

rank, seconds = int(sys.argv[2]), float(sys.argv[3])
with Watchdog(WatchdogConfig(min_seconds=seconds), directory=Path(sys.argv[1]), rank=rank) as watchdog:
    watchdog.watch("reward" if rank else "update")
    stuck_in_here()
"""


def start(directory: Path, rank: int, seconds: float) -> "subprocess.Popen[str]":
    """A rank that hangs; only one with few seconds has an alarm of its own."""
    command = [sys.executable, "-c", RANK, str(directory), str(rank), str(seconds)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_one_rank_s_alarm_makes_every_rank_write_its_stacks_and_exit(tmp_path: Path) -> None:
    begin = time.monotonic()
    ranks = [start(tmp_path, 0, 600.0), start(tmp_path, 1, 1.0)]
    errors = [rank.communicate(timeout=30)[1] for rank in ranks]
    assert time.monotonic() - begin < 20
    assert [rank.returncode for rank in ranks] == [EXIT_STALLED] * 2
    for number, stage in enumerate(["update", "reward"]):
        text = (tmp_path / "stalled" / f"rank_{number}.txt").read_text()
        assert f"rank {number}" in text.splitlines()[0]
        assert f"in stage {stage}" in text.splitlines()[0]
        assert "stuck_in_here" in text
    assert "rank 1 has been in stage reward" in errors[1]
    assert "dppo: error" not in errors[0]


def test_the_limit_follows_the_slowest_so_far_of_the_stage(tmp_path: Path) -> None:
    watchdog = Watchdog(
        WatchdogConfig(enabled=False, min_seconds=0.1, slowest_factor=4.0), directory=tmp_path, rank=0
    )
    for stage, seconds in (("rollout", 0.2), ("update", 0.0), ("rollout", 0.05), ("other", 0.0)):
        watchdog.watch(stage)
        time.sleep(seconds)
    assert 0.8 <= watchdog.limit("rollout") < 1.6
    assert watchdog.limit("update") == 0.1


def test_a_rank_whose_interpreter_is_held_ends_too(tmp_path: Path) -> None:
    # One integer power holds the interpreter's lock: no Python thread runs.
    code = """
import sys
from pathlib import Path
import dppo_megatron.watchdog as module
from dppo_megatron.config.schema import WatchdogConfig
module._BACKSTOP_SECONDS = 1.0
with module.Watchdog(WatchdogConfig(min_seconds=1.0), directory=Path(sys.argv[1]), rank=0):
    9 ** (9 ** 9)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 1
    assert "most recent call first" in result.stderr


def test_nothing_ends_a_process_outside_of_the_context(tmp_path: Path) -> None:
    watchdog = Watchdog(WatchdogConfig(), directory=tmp_path, rank=0)
    with patch("dppo_megatron.watchdog.faulthandler") as backstop:
        watchdog.watch("update")
        backstop.dump_traceback_later.assert_not_called()
        with watchdog:
            watchdog.watch("rollout")
        assert backstop.dump_traceback_later.call_count == 2
        backstop.cancel_dump_traceback_later.assert_called_once()
        watchdog.watch("end")
    assert backstop.dump_traceback_later.call_count == 2


def test_stacks_of_an_earlier_start_do_not_end_the_next(tmp_path: Path) -> None:
    (tmp_path / "stalled").mkdir()
    (tmp_path / "stalled" / "rank_0.txt").write_text("old")
    watchdog = Watchdog(WatchdogConfig(), directory=tmp_path, rank=0)
    watchdog.retire()
    with watchdog:
        time.sleep(1.5)  # longer than its poll
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("stalled-")
    assert (kept / "rank_0.txt").read_text() == "old"


def test_a_rank_ends_when_its_launcher_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path), "0", "600"], env=os.environ | {PARENT: "1"}, text=True
    )
    assert process.wait(timeout=20) == EXIT_STALLED
