from pathlib import Path

import pytest

from dppo_megatron.atomic_file import atomic_write_text


def test_the_new_text_replaces_the_old_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old and longer")
    atomic_write_text(path, "né\n")
    assert path.read_bytes() == "né\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_text_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "a" * 100_000 + "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_open_reader_keeps_the_old_text_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n" * 10_000)
    with path.open() as reader:
        reader.readline()
        atomic_write_text(path, "new\n")
        assert reader.read() == "old\n" * 9_999
