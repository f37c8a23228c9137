"""Turn a public mathematics data set into our JSONL: {"input": question, "output": answer} a line.

python tools/prepare_data.py gsm8k-test data/gsm8k-test.jsonl                    # from the Hugging Face hub
python tools/prepare_data.py gsm8k-test data/gsm8k-test.jsonl --source FOLDER    # from a local copy of its files

Files may be .jsonl, .json (a list) or .parquet (needs pyarrow).
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

_SUFFIXES = (".jsonl", ".json", ".parquet")
_DAPO_BEFORE = "where $Answer is the answer to the problem."
_DAPO_AFTER = "Remember to put your answer on its own line after"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a data set is and how its rows read. files: pattern of the split's files in the repository."""

    repository: str
    files: str
    question: Callable[[Row], str]
    answer: Callable[[Row], str | None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows to write, and how many were left out and why."""

    rows: tuple[tuple[str, str], ...]
    num_read: int
    num_repeated: int
    num_without_answer: int
    num_contradicting: int


def field(*names: str) -> Callable[[Row], str]:
    """The first of the named fields that a row has, as text."""

    def read(row: Row) -> str:
        for name in names:
            if row.get(name) is not None:
                return str(row[name])
        raise ValueError(f"a row has none of {', '.join(names)}; it has {', '.join(row)}")

    return read


def boxed(name: str) -> Callable[[Row], str | None]:
    r"""What stands in the last \boxed{...} of a field."""

    def read(row: Row) -> str | None:
        text = field(name)(row)
        start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
        if start < 0:
            return None
        depth, begin = 0, text.index("{", start)
        for place in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[begin + 1 : place]
        return None

    return read


def after_hashes(row: Row) -> str | None:
    """GSM8K's answer: the number after ####, without thousands separators."""
    _, mark, answer = field("answer")(row).rpartition("####")
    return answer.strip().replace(",", "") if mark else None


def dapo_question(row: Row) -> str:
    """The problem itself, between the instructions that the data set wraps around it."""
    text = str(row["prompt"][0]["content"])
    text = text.partition(_DAPO_BEFORE)[2] or text
    return text.partition(_DAPO_AFTER)[0].strip()


def dapo_prompt(row: Row) -> str:
    """The prompt as the data set has it, its instructions included."""
    return str(row["prompt"][0]["content"])


def dapo_answer(row: Row) -> str:
    """The answer of DAPO's rows."""
    return str(row["reward_model"]["ground_truth"])


def first_of(name: str) -> Callable[[Row], str | None]:
    """The only entry of a list field; None where an answer has several parts."""

    def read(row: Row) -> str | None:
        values = row[name]
        values = [values] if isinstance(values, str) else list(values)
        return str(values[0]).strip().strip("$") if len(values) == 1 else None

    return read


SOURCES: Mapping[str, Source] = {
    "math": Source("EleutherAI/hendrycks_math", "*/train*", field("problem"), boxed("solution")),
    "gsm8k": Source("openai/gsm8k", "main/train*", field("question"), after_hashes),
    "dapo-math-17k": Source("BytedTsinghua-SIA/DAPO-Math-17k", "data/*", dapo_question, dapo_answer),
    "dapo-math-17k-verbatim": Source("BytedTsinghua-SIA/DAPO-Math-17k", "data/*", dapo_prompt, dapo_answer),
    "dapo-aime24-verbatim": Source("BytedTsinghua-SIA/AIME-2024", "data/*", dapo_prompt, dapo_answer),
    "deepscaler": Source("agentica-org/DeepScaleR-Preview-Dataset", "deepscaler*", field("problem"), field("answer")),
    # The part that NeMo-RL trains on; data/train-* would be all 14 million rows.
    "openmathinstruct-2": Source(
        "nvidia/OpenMathInstruct-2", "data/train_1M-*", field("problem"), field("expected_answer")
    ),
    "math-500": Source("HuggingFaceH4/MATH-500", "test*", field("problem"), field("answer")),
    "aime24": Source("HuggingFaceH4/aime_2024", "data/*", field("problem"), field("answer")),
    "aime25": Source("math-ai/aime25", "test*", field("problem"), field("answer")),
    "amc": Source("math-ai/amc23", "*test*", field("question", "problem"), field("answer")),
    "minerva": Source("math-ai/minervamath", "test*", field("question", "problem"), field("answer")),
    "olympiadbench": Source("math-ai/olympiadbench", "test*", field("question"), first_of("final_answer")),
    "gsm8k-test": Source("openai/gsm8k", "main/test*", field("question"), after_hashes),
}


def prepare(source: Source, rows: Iterable[Row]) -> Prepared:
    """Take question and answer out of rows; a question is kept once, and not at all where answers contradict."""
    answers: dict[str, str | None] = {}
    num_read = num_repeated = num_without = 0
    for row in rows:
        num_read += 1
        question, answer = source.question(row).strip(), source.answer(row)
        if answer is None or not answer.strip():
            num_without += 1
        elif question in answers:
            num_repeated += 1
            if answers[question] != answer.strip():
                answers[question] = None
        else:
            answers[question] = answer.strip()
    kept = tuple((question, answer) for question, answer in answers.items() if answer is not None)
    return Prepared(kept, num_read, num_repeated, num_without, len(answers) - len(kept))


def find_files(folder: Path, *, pattern: str) -> list[Path]:
    """The split's files in a copy of the repository; a single file is itself; else every data file in the folder.

    Raises ValueError where there is none.
    """
    if folder.is_file():
        return [folder]
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
    named = [path for path in files if fnmatch(path.relative_to(folder).as_posix(), pattern)]
    # A copy may have lost the repository's folders, but the split must be told apart.
    loose = [path for path in files if fnmatch(path.name, pattern.rpartition("/")[2])]
    if found := named or loose:
        return found
    raise ValueError(f"--source: {folder} has no file {pattern} with suffix {', '.join(_SUFFIXES)}")


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of one file. Raises ValueError where it cannot be read."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ValueError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from error
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError as error:
                        raise ValueError(f"{path}:{number}: not JSON: {error}") from error
    else:
        yield from json.loads(path.read_text(encoding="utf-8"))


def fetch(source: Source) -> Path:
    """The split's files from the hub. Raises ValueError where they cannot be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source.repository, repo_type="dataset", allow_patterns=[source.files]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{source.repository} cannot be had from the hub ({reason}); give a local copy with --source"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", choices=sorted(SOURCES), help=", ".join(sorted(SOURCES)))
    parser.add_argument("output", metavar="OUTPUT", type=Path)
    parser.add_argument("--source", type=Path, help="a folder or file with the data set's files")
    options = parser.parse_args(arguments)
    source = SOURCES[options.name]
    try:
        files = find_files(options.source or fetch(source), pattern=source.files)
        prepared = prepare(source, (row for path in files for row in read_rows(path)))
    except ValueError as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 2
    if not prepared.rows:
        print(f"prepare_data: error: no row of {len(files)} files has question and answer", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"input": q, "output": a}, ensure_ascii=False) + "\n" for q, a in prepared.rows)
    options.output.write_text("".join(lines), encoding="utf-8")
    print(
        f"{options.output}: {len(prepared.rows)} of {prepared.num_read} rows; left out: {prepared.num_repeated} "
        f"repeated, {prepared.num_without_answer} without an answer, {prepared.num_contradicting} with "
        "contradicting answers"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
