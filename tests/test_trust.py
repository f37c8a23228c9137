"""What a model says is data: through rewards, records, messages, terminal and report it changes nothing but texts."""

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dppo_megatron.commands.failures import complain
from dppo_megatron.config.schema import EnvConfig, RewardConfig
from dppo_megatron.report.run_data import read_run
from dppo_megatron.report.run_report import write_report
from dppo_megatron.report.sample_text import samples_text
from dppo_megatron.rl.replay import iterate_samples, samples_path, write_samples
from dppo_megatron.rl.rewards import make_reward
from dppo_megatron.run_console import LastingStream, LiveConsole, PlainConsole
from dppo_megatron.run_messages import Message, append_message, read_messages
from tests.report.run_directories import HOSTILE, a_sample, write_run

TEXTS = [
    HOSTILE,
    "$(touch {here}/owned) `touch {here}/owned`; touch {here}/owned",
    "__import__('os').system('touch {here}/owned')",
    "{0.__class__.__init__.__globals__} %s %(name)s %n {",
    "[red]not red[/red] [link=file:///etc/passwd]x[/link]",
    "\x1b]0;owned\x07\x1b[2J\r",
    'end of line\u2028\u0085\x0b\x0c\n{"step": 0, "reward": 1e9}',
    "\u202egnorw",
    "\\boxed{9^{9^{9^9}}} \\input{/etc/passwd}",
    "'; DROP TABLE samples; --",
]


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """What the model says, aimed at this directory."""
    return [text.replace("{here}", str(tmp_path)) for text in TEXTS]


def test_rewards_take_hostile_completions_as_text(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    module = "def length(prompt, completion, answer):\n    return len(completion)\n"
    module += "def refuse(prompt, completion, answer):\n    raise ValueError(completion)\n"
    (tmp_path / "own_grader.py").write_text(module)
    for name, wanted in (
        ("exact_match", [0.0] * len(texts)),
        ("math", [0.0] * len(texts)),
        ("own_grader:length", [float(len(text)) for text in texts]),
    ):
        reward = make_reward("math", reward=RewardConfig(function=name), env=EnvConfig())
        np.testing.assert_array_equal(reward(texts, texts, ["77"] * len(texts)), wanted)
        reward.close()
    reward = make_reward("math", reward=RewardConfig(function="own_grader:refuse"), env=EnvConfig())
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError) as failure:
        reward(texts, texts, texts)
    reward.close()
    assert texts[-1] in str(failure.value)
    assert texts[0] in caplog.text
    assert not (tmp_path / "owned").exists()


def test_records_give_back_what_was_said(texts: list[str], tmp_path: Path) -> None:
    path = samples_path(tmp_path, step=0)
    samples = [a_sample(index, reward=0.0, kept=True, text=text) for index, text in enumerate(texts)]
    write_samples(path, samples)
    assert [sample.completion for sample in iterate_samples(path)] == texts
    for step, text in enumerate([*texts, "half \ud800"]):
        append_message(tmp_path, Message(step=step, level="warning", text=text, kind="reward"))
    assert [message.text for message in read_messages(tmp_path)] == [*texts, "half \ud800"]


def test_a_terminal_shows_texts_and_obeys_none(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, plain = io.StringIO(), io.StringIO()
    live = LiveConsole(Console(file=stream, width=2000, color_system=None, force_terminal=False), num_steps=1)
    for text in texts:
        live.note(text)
        PlainConsole(LastingStream(plain), num_steps=1).note(text)
        assert complain(RuntimeError(text), 1) == 1
    run = write_run(tmp_path / "run", accuracies={})
    samples = [a_sample(index, reward=index, kept=True, text=text) for index, text in enumerate(texts)]
    write_samples(samples_path(run, step=9), samples)
    listed = samples_text(read_run(run), step=None, count=len(texts))
    shown = (stream.getvalue(), plain.getvalue(), capsys.readouterr().err, listed)
    for said in shown:
        assert not set(said) & {"\x1b", "\x07", "\r", "\x0b", "\x0c", "\u202e"}
        assert "\\x1b]0;owned\\x07" in said
        assert "[red]not red[/red]" in said
        assert "{0.__class__.__init__.__globals__} %s %(name)s %n {" in said


def test_the_report_holds_texts_as_data_alone(texts: list[str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", accuracies={})
    samples = [a_sample(index, reward=index, kept=True, text=text) for index, text in enumerate(texts)]
    write_samples(samples_path(run, step=9), samples)
    for step, text in enumerate(texts):
        append_message(run, Message(step=step, level="warning", text=text, kind=f"kind {step}"))
    page = write_report(run).read_text()
    assert page.count("<script") == 2, "the data and ours"
    assert "<img" not in page
    data = page.partition('id="sample-data">')[2].partition("</script>")[0]
    held = [one["text"] for step in json.loads(data) for group in step["groups"] for one in group["samples"]]
    assert set(texts) <= set(held)
