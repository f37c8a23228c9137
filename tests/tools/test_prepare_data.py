"""Every data set's schema, on small stand-ins of it."""

import json
from pathlib import Path

import pytest

from tools.prepare_data import SOURCES, find_files, main, prepare

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is 2+2?\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)
ROWS = {
    "math": {
        "problem": "What is 2+2?",
        "level": "Level 1",
        "solution": "$2+2=\\boxed{3}$, no: \\boxed{\\frac{8}{2}}.",
    },
    "gsm8k": {"question": "What is 2+2?", "answer": "2 and 2 is <<2+2=4>>4\n#### 1,004"},
    "dapo-math-17k": {"prompt": [{"role": "user", "content": DAPO}], "reward_model": {"ground_truth": "4"}},
    "dapo-math-17k-verbatim": {"prompt": [{"role": "user", "content": DAPO}], "reward_model": {"ground_truth": "4"}},
    "dapo-aime24-verbatim": {"prompt": [{"role": "user", "content": DAPO}], "reward_model": {"ground_truth": "4"}},
    "deepscaler": {"problem": "What is 2+2?", "answer": "4", "solution": "..."},
    "openmathinstruct-2": {"problem": "What is 2+2?", "generated_solution": "...", "expected_answer": "4"},
    "math-500": {"problem": "What is 2+2?", "solution": "...", "answer": "4", "unique_id": "test/1"},
    "aime24": {"id": 60, "problem": "What is 2+2?", "answer": "004", "year": "2024"},
    "aime25": {"problem": "What is 2+2?", "answer": "4", "id": "0"},
    "amc": {"id": 0, "question": "What is 2+2?", "answer": 4.0},
    "minerva": {"question": "What is 2+2?", "answer": "4"},
    "olympiadbench": {"question": "What is 2+2?", "final_answer": ["$4$"], "is_multiple_answer": False},
    "gsm8k-test": {"question": "What is 2+2?", "answer": "#### -4"},
}
ANSWERS = {"math": "\\frac{8}{2}", "gsm8k": "1004", "aime24": "004", "amc": "4.0", "gsm8k-test": "-4"}


@pytest.mark.parametrize("name", SOURCES)
def test_question_and_answer_come_out_of_each_schema(name: str) -> None:
    prepared = prepare(SOURCES[name], [ROWS[name]])
    question = DAPO if name.endswith("-verbatim") else "What is 2+2?"
    assert prepared.rows == ((question, ANSWERS.get(name, "4")),)


def test_what_is_repeated_without_answer_or_contradicting_is_left_out_and_counted() -> None:
    rows = [{"problem": problem, "answer": answer} for problem, answer in ("a1", "a1", "b2", "b3", "c4")]
    prepared = prepare(SOURCES["math-500"], [*rows, {"problem": "d", "answer": " "}])
    assert prepared.rows == (("a", "1"), ("c", "4"))
    assert (prepared.num_read, prepared.num_repeated, prepared.num_without_answer, prepared.num_contradicting) == (
        6,
        2,
        1,
        1,
    )


def test_an_olympiad_answer_of_several_parts_is_left_out() -> None:
    row = ROWS["olympiadbench"] | {"final_answer": ["1", "2"]}
    assert prepare(SOURCES["olympiadbench"], [row]).num_without_answer == 1


def test_a_split_is_found_in_a_copy_with_or_without_the_repository_s_folders(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    for name in ("main/train-0.jsonl", "main/test-0.jsonl", "README.md"):
        (tmp_path / name).write_text("")
    assert [path.name for path in find_files(tmp_path, pattern="main/test*")] == ["test-0.jsonl"]
    assert [path.name for path in find_files(tmp_path / "main", pattern="main/train*")] == ["train-0.jsonl"]
    with pytest.raises(ValueError, match="valid"):
        find_files(tmp_path, pattern="main/valid*")


def test_the_command_writes_our_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "test.jsonl"
    copy.write_text(json.dumps(ROWS["gsm8k-test"]) + "\n\n")
    output = tmp_path / "data" / "out.jsonl"
    assert main(["gsm8k-test", str(output), "--source", str(copy)]) == 0
    assert json.loads(output.read_text()) == {"input": "What is 2+2?", "output": "-4"}
    assert "1 of 1 rows" in capsys.readouterr().out


def test_rows_of_another_schema_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "test.jsonl"
    copy.write_text('{"frage": "?"}\n')
    assert main(["gsm8k-test", str(tmp_path / "out.jsonl"), "--source", str(copy)]) == 2
    assert "none of question; it has frage" in capsys.readouterr().err
