"""Rewards of rollouts: what text a completion has, and what happens when a user's function fails."""

import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dppo_megatron.batches import FinishReason, FloatArray, PromptBatch, Ragged, RolloutBatch
from dppo_megatron.config.schema import EnvConfig, RewardConfig
from dppo_megatron.rl.rewards import Reward, UserReward, make_reward, score_rollouts

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


def user_reward(name: str) -> Reward:
    return make_reward("math", reward=RewardConfig(function=name), env=EnvConfig())


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
    reward = user_reward("graders_found:grade")
    np.testing.assert_array_equal(reward(["a", "bb"], ["", "c"], ["ddd", ""]), [301.0, 12.0])


def test_failures_of_a_user_function_score_zero_and_are_counted_and_logged_once_a_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def grade(prompt: str, completion: str, answer: str) -> object:
        if completion == "raise":
            raise KeyError(answer)
        return {"none": None, "nan": math.nan, "text": "1", "true": np.bool_(True)}.get(completion, 0.25)

    reward = UserReward(grade)
    completions = ["fine", "raise", "none", "nan", "true", "raise", "text"]
    with caplog.at_level(logging.DEBUG, logger="dppo_megatron.rl.rewards"):
        scores = reward(["p"] * 7, completions, ["gold"] * 7)
    np.testing.assert_array_equal(scores, [0.25, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    assert reward.num_failures == 5
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 4
    assert "KeyError: 'gold'" in warnings[0]
    traceback = next(record for record in caplog.records if record.levelno == logging.DEBUG)
    assert traceback.exc_info is not None
    assert traceback.exc_info[0] is KeyError
    assert reward(["p"], ["fine"], ["gold"]).tolist() == [0.25]
    assert reward.num_failures == 0


def test_a_user_function_that_fails_on_every_answer_stops_the_run() -> None:
    def grade(prompt: str, completion: str, answer: str) -> float:
        raise ZeroDivisionError(f"on {completion}")

    reward = UserReward(grade)
    expected = r"the reward function failed on all 2 answers: ZeroDivisionError: on second"
    with pytest.raises(RuntimeError, match=expected):
        reward(["p", "p"], ["first", "second"], ["a", "a"])


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
    with pytest.raises(ValueError, match=rf"dppo.reward.function is '{name}'; .*{problem}"):
        user_reward(name)


def test_an_unknown_environment_is_refused_with_the_allowed_names() -> None:
    with pytest.raises(ValueError, match="env_name is 'code'; allowed are exact_match, math"):
        make_reward("code", reward=RewardConfig(), env=EnvConfig())


def test_the_reward_function_setting_overrides_the_environment_of_the_data() -> None:
    reward = make_reward("math", reward=RewardConfig(function="exact_match"), env=EnvConfig())
    assert reward(["p"], ["2.0"], ["2"]).tolist() == [0.0]
