"""vLLM samples from what the trainer trained, whatever the layouts of the two; skipped without vLLM."""

from collections.abc import Callable
from pathlib import Path

import pytest
from toy_step import make_model

pytest.importorskip("vllm")

WORKER = Path(__file__).parent / "vllm_layout_worker.py"


def test_greedy_completions_are_hugging_face_s_after_each_update_on_every_layout(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    models = [tmp_path / name for name in ("tied", "untied")]
    for model in models:
        make_model(model, tied=model.name == "tied", head_dim=32)
    launch(WORKER, *models, num_processes=2, timeout_seconds=900)
