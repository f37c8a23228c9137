"""A checkpoint is whole or not there, and damage to it is found."""

import shutil
from pathlib import Path

import pytest

from dppo_megatron import checkpoint_files as files


def written(directory: Path, *, num_steps_done: int, size: int = 1) -> Path:
    """A published checkpoint of two files, each of ``size`` ranks having digested its share."""
    pending = files.pending_path(directory, num_steps_done=num_steps_done, writer=7)
    (pending / "policy").mkdir(parents=True)
    (pending / "policy" / "weights.bin").write_bytes(bytes(range(256)) * 50)
    (pending / "run_state.json").write_text("{}")
    digests = [digest for rank in range(size) for digest in files.sync_files(pending, rank=rank, size=size)]
    files.write_checksums(pending, digests)
    return files.publish(pending)


def damage(checkpoint: Path, *, size: int = 1) -> list[str]:
    """What all of ``size`` ranks find."""
    return [problem for rank in range(size) for problem in files.find_damage(checkpoint, rank=rank, size=size)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_checkpoint_is_whole_whoever_wrote_and_whoever_checks(size: int, tmp_path: Path) -> None:
    for writers in (1, 2, 3):
        assert damage(written(tmp_path, num_steps_done=writers, size=writers), size=size) == []


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 6000, 12799])
def test_one_flipped_bit_is_found(place: int, size: int, tmp_path: Path) -> None:
    checkpoint = written(tmp_path, num_steps_done=1)
    content = bytearray((checkpoint / "policy" / "weights.bin").read_bytes())
    content[place] ^= 0x10
    (checkpoint / "policy" / "weights.bin").write_bytes(content)
    assert damage(checkpoint, size=size) == ["policy/weights.bin is not what was written: its checksum differs"]


def test_a_truncated_file_is_found(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, num_steps_done=1)
    content = (checkpoint / "policy" / "weights.bin").read_bytes()
    (checkpoint / "policy" / "weights.bin").write_bytes(content[:-1])
    assert damage(checkpoint) == ["policy/weights.bin has 12799 bytes, 12800 were written"]


def test_a_missing_file_and_missing_or_broken_checksums_are_found(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, num_steps_done=1)
    (checkpoint / "run_state.json").unlink()
    assert damage(checkpoint) == ["run_state.json is missing"]
    text = (checkpoint / "checksums.json").read_text()
    (checkpoint / "checksums.json").write_text(text[:40])
    assert "cannot be read" in damage(checkpoint)[0]
    (checkpoint / "checksums.json").unlink()
    assert damage(checkpoint) == ["checksums.json is missing"]


def test_what_is_being_written_or_deleted_is_no_checkpoint_and_is_swept_away(tmp_path: Path) -> None:
    whole = written(tmp_path, num_steps_done=4)
    for name in (".step_6.12.incomplete", ".step_2.9.deleted"):
        shutil.copytree(whole, tmp_path / name)
    assert files.find_checkpoints(tmp_path) == {4: whole}
    files.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_4"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    first = written(tmp_path, num_steps_done=4)
    (first / "extra").write_text("of the first")
    assert written(tmp_path, num_steps_done=4) == first
    assert not (first / "extra").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step_4"]


def test_a_damaged_checkpoint_set_aside_is_kept_but_not_used(tmp_path: Path) -> None:
    aside = files.set_aside(written(tmp_path, num_steps_done=4))
    assert files.find_checkpoints(tmp_path) == {}
    assert (aside / "policy" / "weights.bin").is_file()
    files.sweep(tmp_path)
    assert aside.is_dir()
