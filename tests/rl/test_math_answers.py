"""The guard around math-verify: verdicts, order, limits, and workers that hang, die or are left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dppo_megatron.config.schema import MathEnvConfig, RewardConfig
from dppo_megatron.rl.math_answers import MathAnswers, extract_answer, quick_verdict

LIMIT = 0.7  # seconds
TOWER = "\\boxed{9^{9^{9^9}}}"


@pytest.fixture(scope="module")
def shared() -> Iterator[MathAnswers]:
    answers = MathAnswers(RewardConfig(), env=MathEnvConfig(num_workers=2))
    assert answers.verify([r"\boxed{1 + x}"], answers=["x + 1"]) == [True]  # warm
    yield answers
    answers.close()


@pytest.fixture(scope="module")
def single(shared: MathAnswers) -> Iterator[MathAnswers]:
    """One impatient worker; its process is the youngest child."""
    answers = MathAnswers(RewardConfig(time_limit_seconds=LIMIT), env=MathEnvConfig(num_workers=1))
    yield answers
    answers.close()


def worker_pids(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"so \boxed{1} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}} holds", r"\{1, 2\}"),
        (r"first \boxed{1}, then \boxed{2", None),
        ("The answer is 12. It was 3 before.", "12"),
        ("**Answer:** 3/4", "3/4"),
        ("the answer is: 5 because two and three make it", "5"),
        ("the answer is 5 or 6", "5 or 6"),
        (r"The answer is $\frac{1}{2}$, as 1 + 1 = 2.", r"\frac{1}{2}"),
        (r"Thus $x = 2$ and \(y = \sqrt{3}\) follow from 7", r"y = \sqrt{3}"),
        ("3 apples and 1,204 pears", "1,204"),
        ("it costs 0.50 in all.", "0.50"),
        ("it falls to -7", "-7"),
        ("no idea", None),
    ],
)
def test_the_last_and_strongest_statement_is_the_answer(completion: str, expected: str | None) -> None:
    assert extract_answer(completion, max_answer_chars=4096) == expected


@pytest.mark.parametrize(
    ("candidate", "gold", "verdict"),
    [
        ("007", "7", True),
        ("1,204", "1204", True),
        ("0.50", "1/2", True),
        (r"-\frac{3}{4}", "-0.75", True),
        ("1204", "1205", False),
        ("1/3", "2/3", False),
        ("1/3", "0.333333", None),
        ("1/0", "1/0", True),
        ("1/0", "1", None),
        ("blue", "blue", True),
        ("", "", False),
        ("1}", "1", False),
        ("{1", "1", False),
        ("}1{", "1", False),
        ("(" * 11 + "1" + ")" * 11, "1", False),
        ("9" * 5000, "1", None),
    ],
)
def test_text_and_plain_numbers_need_no_worker(candidate: str, gold: str, verdict: bool | None) -> None:
    assert quick_verdict(candidate, gold=gold) is verdict


def test_exact_matches_and_wrong_integers_start_no_worker() -> None:
    answers = MathAnswers(RewardConfig(), env=MathEnvConfig())
    before = worker_pids(os.getpid())
    verdicts = answers.verify([r"\boxed{12}", "the answer is 13.", "none"], answers=["12", "12", "12"])
    assert verdicts == [True, False, False]
    assert worker_pids(os.getpid()) == before


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        (r"\boxed{0.5}", r"$\frac12$"),
        (r"\boxed{1 + x}", "x+1"),
        (r"\boxed{\frac{\sqrt{3}}{3}}", r"thus \boxed{\frac{1}{\sqrt{3}}}"),
        (r"The answer is $\{2, 1\}$.", r"\{1, 2\}"),
        (r"\boxed{(0, 1]}", "(0,1]"),
        (r"\boxed{0.333333}", r"\frac{1}{3}"),
        (r"\boxed{x = 4}", "4"),
        (r"\boxed{50\%}", "50%"),
        (r"\boxed{5 \text{ apples}}", "5"),
        (r"\boxed{\text{blue}}", "blue"),
    ],
)
def test_equal_answers_in_other_forms_are_right(shared: MathAnswers, completion: str, gold: str) -> None:
    assert shared.verify([completion], answers=[gold]) == [True]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        r"\boxed{}",
        r"\boxed{5",
        r"\boxed{{5}",
        r"\boxed{5}}" + r"\boxed{",
        r"\boxed{5 or 6}",
        r"\boxed{5, 6}",
        r"\boxed{5)(}",
        r"\boxed{5^{}}",
        r"\boxed{\frac{5}}",
        r"\boxed{\frac{5}{1}{2}}",
        r"\boxed{" + "{" * 400 + "5" + "}" * 400 + "}",
        r"\boxed{" + r"\frac{" * 300 + "5" + "}{1}" * 300 + "}",
        r"\boxed{" + "5+0" * 2000 + "}",
        r"\boxed{" + "9" * 4000 + "}",
        "$" * 5000,
        "x$5x" * 5000,
        r"the answer is \(" * 2000,
        "\x00\ud800 \\boxed{\ud800}",
    ],
)
def test_malformed_and_hedged_answers_are_wrong(shared: MathAnswers, completion: str) -> None:
    started = time.monotonic()
    assert shared.verify([completion], answers=["5"]) == [False]
    assert time.monotonic() - started < 2.0
    assert shared.num_failures == 0


def test_an_answer_may_end_a_long_completion() -> None:
    answers = MathAnswers(RewardConfig(max_answer_chars=100), env=MathEnvConfig())
    thoughts = "so we try 3 once more. " * 1000
    assert answers.verify([thoughts + r"\boxed{12}", thoughts + "Answer: 12"], answers=["12"] * 2) == [True] * 2


def test_verdicts_keep_the_order_of_the_answers(shared: MathAnswers) -> None:
    picks = random.Random(3)
    cases = [(f"\\boxed{{x^{n} + {n % 4}}}", f"{n % 3} + x^{n}", n % 4 == n % 3) for n in range(2, 26)]
    cases = [picks.choice(cases) for _ in range(60)]
    verdicts = shared.verify([case[0] for case in cases], answers=[case[1] for case in cases])
    assert verdicts == [case[2] for case in cases]


def test_a_hanging_worker_is_killed_and_the_next_answers_are_verified(single: MathAnswers) -> None:
    assert single.verify([r"\boxed{1 + x}"], answers=["x + 1"]) == [True]  # warm
    hanging = worker_pids(os.getpid())[-1]
    started = time.monotonic()
    assert single.verify([TOWER, TOWER], answers=["5", "5"]) == [False, False]
    assert LIMIT <= time.monotonic() - started < LIMIT + 1.5
    assert single.num_failures == 2
    assert not Path(f"/proc/{hanging}").exists()
    assert single.verify([r"\boxed{1 + x}"], answers=["x + 1"]) == [True]
    assert single.num_failures == 0


def test_a_worker_that_died_while_idle_costs_its_answer_alone(single: MathAnswers) -> None:
    assert single.verify([r"\boxed{1 + x}"], answers=["x + 1"]) == [True]
    os.kill(worker_pids(os.getpid())[-1], signal.SIGKILL)
    assert single.verify([r"\boxed{2 + x}", r"\boxed{3 + x}"], answers=["x + 2", "x + 3"]) == [False, True]
    assert single.num_failures == 1


def test_workers_die_with_a_killed_parent_even_inside_an_answer() -> None:
    script = (
        "from dppo_megatron.config.schema import MathEnvConfig, RewardConfig\n"
        "from dppo_megatron.rl.math_answers import MathAnswers\n"
        "answers = MathAnswers(RewardConfig(time_limit_seconds=0.5), env=MathEnvConfig(num_workers=2))\n"
        "answers.verify([r'\\boxed{1 + x}', r'\\boxed{2 + x}'], answers=['x + 1', 'x + 2'])\n"
        "print('warm', flush=True)\n"
        f"answers.verify([r'{TOWER}'], answers=['5'])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"warm\n"
    workers = worker_pids(parent.pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(workers) == 2
    deadline = time.monotonic() + 4.0
    while any(is_running(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(worker) for worker in workers)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answers = MathAnswers(RewardConfig(), env=MathEnvConfig(num_workers=1))
    with pytest.raises(RuntimeError, match="did not start"):
        answers.verify([r"\boxed{1 + x}"], answers=["x + 1"])


def test_the_module_that_workers_import_is_light() -> None:
    check = "import sys, dppo_megatron.rl.math_answers as m; print({'torch', 'numpy', 'sympy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("reward", "env", "field"),
    [
        (RewardConfig(time_limit_seconds=0.0), MathEnvConfig(), "dppo.reward.time_limit_seconds is 0.0"),
        (RewardConfig(max_answer_chars=-1), MathEnvConfig(), "dppo.reward.max_answer_chars is -1"),
        (RewardConfig(), MathEnvConfig(num_workers=0), "env.math.num_workers is 0"),
    ],
)
def test_limits_that_are_not_positive_are_refused(reward: RewardConfig, env: MathEnvConfig, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        MathAnswers(reward, env=env)
