"""Rewards of rollouts: what text a completion has, and what happens when a user's function fails."""

import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dppo_megatron.batches import FinishReason, FloatArray, PromptBatch, Ragged, RolloutBatch
from dppo_megatron.config.schema import EnvConfig, RewardConfig
from dppo_megatron.rl.rewards import UserReward, make_reward, score_rollouts

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789=abc"]
EOS, PADDED_ID = WORDS.index("<eos>"), 60


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: row for row, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def ids(text: str) -> list[int]:
    return [WORDS.index(letter) for letter in text]


def make_rollouts(
    rows: list[list[int]], *, reasons: list[FinishReason], texts: tuple[str, ...], answers: tuple[str, ...]
) -> RolloutBatch:
    num_prompts = len(texts)
    prompts = PromptBatch(
        prompt_ids=np.arange(num_prompts),
        occurrences=np.zeros(num_prompts, np.int64),
        minibatches=np.zeros(num_prompts, np.int64),
        tokens=Ragged.from_rows([[1]] * num_prompts),
        texts=texts,
        answers=answers,
        weights=np.ones(num_prompts),
        num_candidates=np.array([num_prompts]),
    )
    completions = Ragged.from_rows(rows)
    logprobs = np.zeros(len(completions.values), np.float32)
    return RolloutBatch(
        prompts=prompts,
        completions=completions,
        sampled_logprobs=logprobs,
        finish_reasons=np.array(reasons, np.int64),
        version=0,
    )


class Recorder:
    """A reward that notes what it is given and returns what it is told to."""

    requires_stop: bool = False
    num_failures: int = 0

    def __init__(self, result: Sequence[float]) -> None:
        self.result = result
        self.calls: list[tuple[str, str, str]] = []

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], answers: Sequence[str]) -> FloatArray:
        self.calls += zip(prompts, completions, answers, strict=True)
        return np.array(self.result, np.float64)

    def close(self) -> None:
        pass


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    return tmp_path


@contextmanager
def user_reward(name: str, **limits: Any) -> Iterator[UserReward]:
    reward = make_reward("math", reward=RewardConfig(function=name, **limits), env=EnvConfig())
    assert isinstance(reward, UserReward)
    with closing(reward):
        yield reward


def test_a_completion_meets_its_own_prompt_and_loses_only_a_sampled_stop_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollouts = make_rollouts(
        [[*ids("12"), EOS], [EOS], ids("3"), [*ids("4"), 0, *ids("5"), EOS]],
        reasons=[STOP, STOP, LENGTH, STOP],
        texts=("a=", "b="),
        answers=("12", "45"),
    )
    reward = Recorder([0.0, 1.0, 0.5, -2.0])
    scores = score_rollouts(rollouts, reward=reward, tokenizer=tokenizer)
    assert reward.calls == [
        ("a=", "12", "12"),
        ("a=", "", "12"),
        ("b=", "3", "45"),
        ("b=", "4<pad>5", "45"),
    ]
    np.testing.assert_array_equal(scores, [0.0, 1.0, 0.5, -2.0])


def test_exact_match_wants_every_character_and_a_stop(tokenizer: PreTrainedTokenizerFast) -> None:
    rollouts = make_rollouts(
        [[*ids("012"), EOS], [*ids("12"), EOS], ids("012"), [*ids("01"), 0, *ids("2"), EOS]],
        reasons=[STOP, STOP, LENGTH, STOP],
        texts=("210=",),
        answers=("012",),
    )
    reward = make_reward("exact_match", reward=RewardConfig(), env=EnvConfig())
    np.testing.assert_array_equal(score_rollouts(rollouts, reward=reward, tokenizer=tokenizer), [1.0, 0.0, 0.0, 0.0])


def test_ids_that_the_tokenizer_does_not_know_make_a_completion_wrong(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rollouts = make_rollouts(
        [
            [PADDED_ID, *ids("1"), PADDED_ID, PADDED_ID, *ids("2"), EOS],
            [*ids("12"), PADDED_ID],
            [*ids("12"), EOS],
        ],
        reasons=[STOP, LENGTH, STOP],
        texts=("a=",),
        answers=("12",),
    )
    reward = Recorder([0.0, 0.0, 0.0])
    score_rollouts(rollouts, reward=reward, tokenizer=tokenizer)
    assert [call[1] for call in reward.calls] == ["\ufffd1\ufffd\ufffd2", "12\ufffd", "12"]


def test_math_needs_no_stop_and_compares_values(tokenizer: PreTrainedTokenizerFast) -> None:
    rollouts = make_rollouts([ids("a=012"), ids("a=13")], reasons=[LENGTH] * 2, texts=("a",), answers=("12",))
    reward = make_reward("math", reward=RewardConfig(), env=EnvConfig())
    np.testing.assert_array_equal(score_rollouts(rollouts, reward=reward, tokenizer=tokenizer), [1.0, 0.0])
    assert reward.num_failures == 0


def test_no_rollouts_have_no_rewards_and_ask_nobody(tokenizer: PreTrainedTokenizerFast) -> None:
    reward = Recorder([1.0])
    rollouts = make_rollouts([], reasons=[], texts=(), answers=())
    assert score_rollouts(rollouts, reward=reward, tokenizer=tokenizer).shape == (0,)
    assert reward.calls == []


@pytest.mark.parametrize("result", [[1.0], [1.0, 2.0, 3.0], [1.0, math.nan]])
def test_a_reward_of_the_wrong_shape_or_not_finite_stops_the_run(
    tokenizer: PreTrainedTokenizerFast, result: list[float]
) -> None:
    rollouts = make_rollouts([ids("1"), ids("2")], reasons=[LENGTH] * 2, texts=("a",), answers=("1",))
    with pytest.raises(RuntimeError, match="must return 2 finite numbers"):
        score_rollouts(rollouts, reward=Recorder(result), tokenizer=tokenizer)


def test_a_user_function_is_found_in_the_working_directory(in_tmp_path: Path) -> None:
    (in_tmp_path / "graders_found.py").write_text(
        "def grade(prompt: str, completion: str, answer: str) -> float:\n"
        "    return len(prompt) + 10 * len(completion) + 100 * len(answer)\n"
    )
    with user_reward("graders_found:grade") as reward:
        np.testing.assert_array_equal(reward(["a", "bb"], ["", "c"], ["ddd", ""]), [301.0, 12.0])


FAULTY = """
import ctypes, math, os, time
import numpy as np

def grade(prompt, completion, answer):
    if completion == "raise":
        raise KeyError(answer)
    if completion == "hang":
        time.sleep(60)
    if completion == "leave":
        os._exit(3)
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "gather":
        return float(len(bytearray(2**30)))
    if completion == "say":
        print("a reward may print")
    return {"none": None, "nan": math.nan, "text": "1", "true": np.bool_(True)}.get(completion, 0.25)

def pid(prompt, completion, answer):
    return float(os.getpid())

def fail(prompt, completion, answer):
    raise ZeroDivisionError(f"on {completion}")

def sound(prompt, completion, answer):
    return sum(map(ord, prompt)) / 7 - sum(map(ord, completion)) / 3 + len(answer)
"""


@pytest.fixture
def faulty(in_tmp_path: Path) -> str:
    """The name of a module of functions that fail in every way."""
    (in_tmp_path / "graders_faulty.py").write_text(FAULTY)
    return "graders_faulty"


def test_failures_of_a_user_function_score_zero_and_are_counted_and_logged_once_a_kind(
    faulty: str, caplog: pytest.LogCaptureFixture
) -> None:
    completions = ["fine", "raise", "none", "nan", "true", "raise", "text"]
    with user_reward(f"{faulty}:grade") as reward:
        with caplog.at_level(logging.DEBUG, logger="dppo_megatron.rl.rewards"):
            scores = reward(["p"] * 7, completions, ["gold"] * 7)
        np.testing.assert_array_equal(scores, [0.25, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
        assert reward.num_failures == 5
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == 4
        assert "KeyError: 'gold'" in warnings[0]
        traceback = next(record for record in caplog.records if record.levelno == logging.DEBUG)
        assert "raise KeyError(answer)" in traceback.getMessage()
        assert reward(["p"], ["fine"], ["gold"]).tolist() == [0.25]
        assert reward.num_failures == 0


@pytest.mark.parametrize("num_workers", [1, 3])
def test_an_answer_that_hangs_or_ends_its_process_costs_itself_alone(
    num_workers: int, faulty: str, caplog: pytest.LogCaptureFixture
) -> None:
    completions = ["fine"] * 5 + ["hang", "fine", "leave", "true"] + ["fine"] * 4 + ["crash", "say", "gather", "true"]
    limits = {"time_limit_seconds": 1.0, "num_workers": num_workers, "memory_gb": 0.75}
    with user_reward(f"{faulty}:grade", **limits) as reward:
        scores = reward(["p"] * len(completions), completions, ["gold"] * len(completions))
        worth = {"hang": 0.0, "leave": 0.0, "crash": 0.0, "gather": 0.0, "true": 1.0}
        np.testing.assert_array_equal(scores, [worth.get(completion, 0.25) for completion in completions])
        assert reward.num_failures == 4
        said = caplog.text
        for words in (
            "took longer than dppo.reward.time_limit_seconds = 1.0",
            "exit code 3",
            "SIGSEGV",
            "MemoryError",
        ):
            assert words in said
        assert reward(["p"], ["fine"], ["gold"]).tolist() == [0.25], "the run goes on"


@pytest.mark.parametrize("num_workers", [1, 3])
def test_rewards_are_those_of_a_call_in_the_process_in_order(num_workers: int, faulty: str) -> None:
    space: dict[str, Any] = {}
    exec(FAULTY, space)
    hostile = ["\ud800", "\x00", "$(touch x)", "{0.__class__}", "</script>", "c\n\u2028", "\N{SNOWMAN}"]
    texts = [f"{text}{number}" for number in range(60) for text in hostile]
    arguments = (texts, texts[::-1], [text * 2 for text in texts])
    wanted = [space["sound"](*one) for one in zip(*arguments, strict=True)]
    with user_reward(f"{faulty}:sound", num_workers=num_workers) as reward:
        for _ in range(2):
            assert reward(*arguments).tolist() == wanted, "not bit for bit, or out of order"


def test_user_functions_run_in_processes_of_their_own_that_last(faulty: str) -> None:
    with user_reward(f"{faulty}:pid") as reward:
        first, second = (set(reward(["p"] * 200, ["c"] * 200, ["a"] * 200).tolist()) for _ in range(2))
        assert first == second
        assert len(first) == 1
        (pid,) = first
        assert pid != os.getpid()
        assert Path(f"/proc/{int(pid)}").exists()
    assert not Path(f"/proc/{int(pid)}").exists(), "left behind"


def test_a_user_function_that_fails_on_every_answer_stops_the_run(faulty: str) -> None:
    expected = r"the reward function failed on all 2 answers: ZeroDivisionError: on second"
    with user_reward(f"{faulty}:fail") as reward, pytest.raises(RuntimeError, match=expected):
        reward(["p", "p"], ["first", "second"], ["a", "a"])
    with user_reward(f"{faulty}:grade") as reward, pytest.raises(RuntimeError, match="exit code 3"):
        reward(["p", "p"], ["leave", "leave"], ["a", "a"])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("graders_bad:missing", "missing does not exist in .*graders_bad.py"),
        ("graders_bad:LIMIT", "LIMIT is not callable"),
        ("graders_absent:grade", "importing graders_absent failed: No module named 'graders_absent'"),
        ("graders_broken:grade", "importing graders_broken failed: No module named 'not_installed'"),
        (":grade", "a function of your own is module:function"),
        ("exact", "allowed are exact_match, math, and module:function"),
    ],
)
def test_a_user_function_that_cannot_be_used_is_refused_at_set_up(in_tmp_path: Path, name: str, problem: str) -> None:
    (in_tmp_path / "graders_bad.py").write_text("LIMIT = 3\n")
    (in_tmp_path / "graders_broken.py").write_text("import not_installed\n")
    with pytest.raises(ValueError, match=rf"dppo.reward.function is '{name}'; .*{problem}"), user_reward(name):
        pass


def test_an_unknown_environment_is_refused_with_the_allowed_names() -> None:
    with pytest.raises(ValueError, match="env_name is 'code'; allowed are exact_match, math"):
        make_reward("code", reward=RewardConfig(), env=EnvConfig())


def test_the_reward_function_setting_overrides_the_environment_of_the_data() -> None:
    reward = make_reward("math", reward=RewardConfig(function="exact_match"), env=EnvConfig())
    assert reward(["p"], ["2.0"], ["2"]).tolist() == [0.0]


def test_a_tokenizer_that_cannot_decode_ends_the_run_with_its_words(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> list[str]:
        raise OverflowError("number too large")

    monkeypatch.setattr(tokenizer, "batch_decode", fail)
    rollouts = make_rollouts([ids("1"), ids("2")], reasons=[LENGTH] * 2, texts=("a",), answers=("1",))
    with pytest.raises(RuntimeError, match="the tokenizer cannot decode the completions: OverflowError: number too"):
        score_rollouts(rollouts, reward=Recorder([0.0, 0.0]), tokenizer=tokenizer)
