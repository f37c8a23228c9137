"""Claims about how a process is asked to stop."""

import os
import signal
import subprocess
import sys
import time

import pytest

from dppo_megatron.stop_request import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_cuts_an_attempt_short_and_is_remembered(number: signal.Signals) -> None:
    def work() -> str:
        os.kill(os.getpid(), number)
        time.sleep(30)
        return "done"

    start = time.monotonic()
    with StopRequest(must_save_by_seconds=None) as stop:
        assert stop.attempt(work) is None
        assert stop.attempt(lambda: "not begun") is None
    assert stop.signalled
    assert stop.reason == f"signal {number.name}"
    assert time.monotonic() - start < 5


def test_a_signal_outside_an_attempt_disturbs_nothing() -> None:
    with StopRequest(must_save_by_seconds=None) as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert stop.signalled


def test_an_attempt_hands_on_its_result_and_its_error() -> None:
    with StopRequest(must_save_by_seconds=None) as stop:
        assert stop.attempt(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            stop.attempt(lambda: 1 // 0)
        os.kill(os.getpid(), signal.SIGUSR1)  # no attempt is under way any more
        assert stop.signalled


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    with StopRequest(must_save_by_seconds=None):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = """
import os, signal, time
from dppo_megatron.stop_request import StopRequest
with StopRequest(must_save_by_seconds=None):
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)  # the same request, delivered twice
    time.sleep(2.1)
    print("alive", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == 128 + signal.SIGTERM
    assert result.stdout == "alive\n"


def test_time_is_up_when_the_next_step_would_pass_the_limit() -> None:
    clock = [100.0]
    stop = StopRequest(must_save_by_seconds=60.0, now=lambda: clock[0])
    clock[0] = 130.0
    assert not stop.leaves_no_time(next_seconds=29.0)
    assert stop.leaves_no_time(next_seconds=31.0)
    assert not StopRequest(must_save_by_seconds=None, now=lambda: clock[0]).leaves_no_time(next_seconds=1e9)
