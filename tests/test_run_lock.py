"""Claims about two runs in one directory."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dppo_megatron.run_lock import NAME, RunLock

HOLDER = """
import sys, time
from pathlib import Path
from dppo_megatron.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(directory: Path) -> "subprocess.Popen[str]":
    """Another process that holds the directory."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_told_who_is_there(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        with pytest.raises(ValueError, match=f"process {holder.pid} on {socket.gethostname()}"), RunLock(tmp_path):
            pass
        assert (tmp_path / NAME).exists(), "the refused run removed the holder's lock"
    finally:
        holder.kill()
        holder.communicate()


def test_a_killed_run_leaves_no_lock_behind(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with RunLock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_the_directory_is_clean_after_a_run(tmp_path: Path) -> None:
    with RunLock(tmp_path / "new"):
        assert (tmp_path / "new" / NAME).exists()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_live_run_of_another_machine_is_seen_by_the_file_s_time(tmp_path: Path) -> None:
    # As on a file system whose kernel locks stay within each machine: nobody here holds the lock.
    path = tmp_path / NAME
    path.write_text(json.dumps({"host": "elsewhere", "pid": 4, "since": "now"}))
    with pytest.raises(ValueError, match="process 4 on elsewhere"), RunLock(tmp_path):
        pass
    assert [one.name for one in tmp_path.iterdir()] == [NAME]


def test_a_dead_run_of_another_machine_gives_way(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text(json.dumps({"host": "elsewhere", "pid": 4, "since": "now"}))
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    with RunLock(tmp_path):
        assert json.loads(path.read_text())["host"] == socket.gethostname()


def test_a_lost_directory_does_not_hide_why_the_run_ends(tmp_path: Path) -> None:
    directory = tmp_path / "run"

    def lose_it() -> None:
        with RunLock(directory):
            directory.rename(tmp_path / "elsewhere")
            directory.write_text("a file where the directory was")
            raise RuntimeError("cannot be written")

    with pytest.raises(RuntimeError, match="cannot be written"):
        lose_it()
