"""Claims about what policy.model_name may name, and what travels with weights."""

from pathlib import Path
from typing import Any

import pytest

from dppo_megatron.model_source import copy_companions, find_model


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Requests to the hub, which answers with a directory."""
    requests: list[dict[str, Any]] = []

    def answer(repository: str, **arguments: Any) -> str:
        requests.append({"repository": repository, **arguments})
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", answer)
    return requests


def test_a_hub_name_may_carry_a_revision_and_no_pickle_is_fetched(fetched: list[dict[str, Any]]) -> None:
    find_model("Qwen/Qwen3-4B@abc123")
    find_model("Qwen/Qwen3-4B")
    assert [(request["repository"], request["revision"]) for request in fetched] == [
        ("Qwen/Qwen3-4B", "abc123"),
        ("Qwen/Qwen3-4B", None),
    ]
    assert not [pattern for pattern in fetched[0]["allow_patterns"] if "bin" in pattern or ".py" in pattern]


def test_a_run_stands_for_its_export_and_a_checkpoint_for_itself(tmp_path: Path) -> None:
    for directory in (tmp_path / "run" / "hf", tmp_path / "step_3"):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
    assert find_model(str(tmp_path / "run")) == tmp_path / "run" / "hf"
    assert find_model(str(tmp_path / "step_3")) == tmp_path / "step_3"


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path, fetched: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="directory without config"):
        find_model(str(tmp_path))
    with pytest.raises(ValueError, match="there is no directory"):
        find_model(str(tmp_path / "absent"))
    assert fetched == []


def test_tokenizer_templates_and_licence_travel_and_weights_and_code_do_not(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    kept = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
        "LICENSE",
        "additional_chat_templates/tools.jinja",
    ]
    left = ["model.safetensors", "pytorch_model.bin", "modeling_mine.py", "manifest.json", "optimizer.pt"]
    for name in kept + left:
        (source / name).write_text(name)
    copy_companions(source, target)
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert copied == set(kept)
    assert all((target / name).read_text() == name for name in kept)
