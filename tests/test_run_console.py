import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dppo_megatron import metric_names
from dppo_megatron.run_console import LastingStream, LiveConsole, PlainConsole, open_console
from dppo_megatron.run_records import StepRecord, SummaryRecord, Totals
from dppo_megatron.stage_clock import StageSeconds


def a_step(step: int, *, accuracy: float | None = None, seconds: float = 4.0) -> StepRecord:
    return StepRecord(
        step=step,
        reward=0.25,
        accuracy=accuracy,
        kept_fraction=0.5,
        kept_prompts_fraction=0.75,
        rollout_tokens=123_456,
        train_tokens=40_000,
        train_tokens_without_pruning=160_000,
        loss=-0.01,
        grad_norm=1.5,
        learning_rate=1e-3,
        stage_seconds=StageSeconds(rollout=seconds * 0.75, update=seconds * 0.25),
        extra=(
            (metric_names.ROLLOUT_TOKENS_PER_SECOND, 41_152.0),
            (metric_names.TRAIN_TOKENS_PER_SECOND, 9000.0),
            (metric_names.TRAIN_FLOPS_PER_SECOND, 2.5e12),
            (metric_names.TRAIN_UTILISATION, 0.25),
        ),
    )


def a_summary() -> SummaryRecord:
    totals = Totals(accuracy_before=0.125).with_step(a_step(0, accuracy=0.5))
    return SummaryRecord.from_totals(totals, run_directory="logs/run")


def plain_output(*, steps: int) -> list[str]:
    stream = io.StringIO()
    console = PlainConsole(LastingStream(stream), num_steps=100)
    for step in range(steps):
        console.step(a_step(step, accuracy=0.625 if step == 1 else None))
    return stream.getvalue().splitlines()


def test_a_file_gets_one_line_a_step_and_a_header_every_twenty() -> None:
    lines = plain_output(steps=41)
    headers = [number for number, line in enumerate(lines) if "reward" in line]
    assert headers == [0, 21, 42]
    assert len(lines) == 41 + 3


def test_a_line_says_step_reward_accuracy_kept_tokens_saved_seconds_and_what_remains() -> None:
    lines = plain_output(steps=2)
    assert lines[1].split() == ["1/100", "0.250", "-", "50.0%", "40.0k", "30.9k", "75.0%", "4.0s", "0:06:36"]
    assert lines[2].split() == ["2/100", "0.250", "62.5%", "50.0%", "40.0k", "30.9k", "75.0%", "4.0s", "0:06:32"]


def test_lines_are_aligned_and_fit_eighty_columns() -> None:
    lines = plain_output(steps=12)
    assert {len(line) for line in lines} == {79}


def test_the_time_left_follows_the_mean_of_the_recent_steps() -> None:
    stream = io.StringIO()
    console = PlainConsole(LastingStream(stream), num_steps=20)
    console.step(a_step(0, seconds=1000.0))
    for step in range(1, 13):
        console.step(a_step(step, seconds=2.0 if step < 12 else 3.0))
    assert stream.getvalue().splitlines()[-1].endswith(" 0:00:15")  # 7 steps at (11 * 2 + 3) / 12


def test_the_closing_block_says_accuracy_tokens_time_by_stage_and_where() -> None:
    stream = io.StringIO()
    PlainConsole(LastingStream(stream), num_steps=1).summary(a_summary())
    text = stream.getvalue()
    assert "12.5% -> 50.0%" in text
    assert "123,456 of 160,000: 36,544 saved (22.8%)" in text
    assert "40,000 of 160,000: 120,000 saved (75.0%)" in text
    assert re.search(r"rollout +3\.0s +75\.0%  #{30}\n", text)
    assert re.search(r"update +1\.0s +25\.0%  #{10}\n", text)
    assert "packing" not in text
    assert text.endswith("run directory   logs/run\n")
    assert max(len(line) for line in text.splitlines()) <= 80


def live_output(*, steps: int) -> str:
    stream = io.StringIO()
    console = LiveConsole(Console(file=stream, force_terminal=True, width=80), num_steps=20)
    for step in range(steps):
        console.step(a_step(step))
    console.close()
    return stream.getvalue()


def last_frame(output: str) -> str:
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output)
    return plain[plain.rindex("reward") :]


def test_a_terminal_shows_the_last_twelve_steps_progress_and_stage_shares() -> None:
    frame = last_frame(live_output(steps=15))
    assert re.findall(r"(\d+)/20 +0\.250", frame) == [str(step) for step in range(4, 16)]
    assert re.search(r"15/20 \S+ +0:00:20 left", frame)
    assert "rollout 75%  update 25%" in frame
    assert "rollout 41.2k tok/s  training 9000 tok/s  2.5TFLOP/s (25.0% of peak)" in frame
    assert "saved so far: 75.0% of training tokens, 22.8% of sampled tokens" in frame


def test_saved_is_over_the_steps_so_far_and_not_the_last_one() -> None:
    stream = io.StringIO()
    console = PlainConsole(LastingStream(stream), num_steps=2)
    console.step(replace(a_step(0), train_tokens=160_000))
    console.step(replace(a_step(1), train_tokens=0))
    assert [line.split()[6] for line in stream.getvalue().splitlines()[1:]] == ["0.0%", "50.0%"]


def test_a_terminal_is_redrawn_in_place_and_gets_its_cursor_back() -> None:
    output = live_output(steps=2)
    assert "\x1b[1A" in output
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_a_note_on_a_terminal_stands_above_the_table_as_written() -> None:
    stream = io.StringIO()
    console = LiveConsole(Console(file=stream, force_terminal=True, width=80), num_steps=20)
    console.step(a_step(0))
    console.note("resumed [bold]at[/bold] 3")
    console.close()
    output = stream.getvalue()
    assert output.index("resumed [bold]at[/bold] 3") < output.rindex("reward")


def test_a_file_gets_plain_lines_without_escapes() -> None:
    stream = io.StringIO()
    console = open_console(stream, num_steps=3)
    assert isinstance(console, PlainConsole)
    console.step(a_step(0))
    console.summary(a_summary())
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().isascii()


@pytest.mark.parametrize(("terminal", "kind"), [("xterm", LiveConsole), ("dumb", PlainConsole)])
def test_only_a_terminal_that_moves_its_cursor_is_live(
    monkeypatch: pytest.MonkeyPatch, terminal: str, kind: type
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", terminal)
    assert type(open_console(Terminal(), num_steps=3)) is kind


def test_a_closed_stream_is_told_once_and_then_ignored(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    console = open_console(stream, num_steps=3)
    stream.close()
    console.note("a")
    console.note("b")
    assert [record.message for record in caplog.records] == [
        "console output stops (the stream is closed); metrics.jsonl goes on"
    ]


def test_a_letter_that_the_stream_cannot_write_becomes_a_question_mark() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    open_console(stream, num_steps=3).note("directory é")
    assert stream.buffer.getvalue() == b"directory ?\n"  # type: ignore[attr-defined]


_RUN = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_run_console import a_step
from dppo_megatron.run_log import RunLog
with RunLog(Path({directory!r}), num_steps=1000, tensorboard=False, console=sys.stdout) as log:
    for step in range(1000):
        log.step(a_step(step))
    log.summary()
"""


def test_a_reader_that_leaves_early_does_not_stop_the_run(tmp_path: Path) -> None:
    script = _RUN.format(tests=str(Path(__file__).parent), directory=str(tmp_path))
    # Buffered, as by default: only then is something left to flush at exit.
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.readline()
        run.stdout.close()
        errors = run.stderr.read().decode()
    assert run.returncode == 0, errors
    assert errors.count("console output stops") == 1
    assert "Exception ignored" not in errors
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1000
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1000
