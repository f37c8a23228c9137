import io
import json
import logging
from pathlib import Path

from dppo_megatron.run_log import RunLog
from dppo_megatron.run_messages import MessageGroup, grouped, read_messages
from tests.report.run_directories import a_step

logger = logging.getLogger("dppo_megatron.rl.rewards")


def test_a_warning_is_told_once_counted_at_the_end_and_kept_each_time(tmp_path: Path) -> None:
    console = io.StringIO()
    with RunLog(tmp_path, num_steps=3, tensorboard=False, console=console) as log:
        for step in range(3):
            logger.warning("answer %d got no verdict", step)
            log.step(a_step(step))
        log.summary()
    text = console.getvalue()
    assert text.count("warning: answer 0 got no verdict") == 1
    assert "answer 1 got no verdict" not in text
    assert "3 times, steps 0-2: answer 0 got no verdict" in text
    (group,) = grouped(read_messages(tmp_path))
    assert group == MessageGroup("warning", "answer 0 got no verdict", 3, 0, 2)


def test_after_the_run_warnings_go_where_they_went_before(tmp_path: Path, caplog) -> None:
    with RunLog(tmp_path, num_steps=1, tensorboard=False, console=io.StringIO()):
        logger.warning("inside")
    logger.warning("outside")
    assert [record.getMessage() for record in caplog.records] == ["outside"]


def test_a_resumed_run_keeps_what_was_said_before_its_step_and_what_it_says_itself(tmp_path: Path) -> None:
    with RunLog(tmp_path, num_steps=4, tensorboard=False, console=io.StringIO()) as log:
        log.note("first start")
        for step in range(4):
            log.note(f"before step {step}")
            log.step(a_step(step))
    with RunLog(tmp_path, num_steps=4, tensorboard=False, console=io.StringIO()) as log:
        log.note("second start")
        log.resume_from(2)
    said = [(message.step, message.text) for message in read_messages(tmp_path)]
    assert said[:4] == [(0, "first start"), (0, "before step 0"), (1, "before step 1"), (2, "second start")]
    assert len(said) == 5  # and that later steps were dropped


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    line = json.dumps({"step": 0, "level": "note", "kind": "a", "text": "a"})
    (tmp_path / "messages.jsonl").write_text(line + "\n" + line[:10])
    assert len(read_messages(tmp_path)) == 1
