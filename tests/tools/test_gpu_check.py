"""The GPU check, as far as a CPU reaches: its comparisons on plain torch, what it leaves out, its table, its exit."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dppo_megatron import device
from tools.gpu_check import EXIT_NO_GPU, Difference, Measured, Row, difference, exit_code, judge, table, why_not

ROOT = Path(__file__).parents[2]


def measured(scale: float) -> Measured:
    """Two gradients and two log-probs."""
    gradients = {"a": torch.tensor([3.0, 0.0]) * scale, "b": torch.tensor([4.0]) * scale}
    return Measured(torch.tensor([-1.0, -2.0]) * scale, scale, gradients)


def test_differences_are_relative_to_the_other() -> None:
    found = difference(measured(1.1), measured(1.0))
    assert found.gradients == pytest.approx(0.1, rel=1e-5)
    assert found.mean_logprob == pytest.approx(0.15, rel=1e-5)
    assert found.largest_logprob == pytest.approx(0.2, rel=1e-5)
    assert found.likelihood == pytest.approx(0.1)


def test_a_row_says_ok_or_failed_and_what_was_raised() -> None:
    near = judge("near", lambda: Difference(0.0, 0.0, 0.0, 0.04), limit=0.05)
    far = judge("far", lambda: Difference(0.0, 0.0, 0.0, 0.06), limit=0.05)

    def breaks() -> Difference:
        raise RuntimeError("no such kernel")

    broken = judge("broken", breaks, limit=0.05)
    skipped = Row("recipe", "skipped", "needs compute capability 10")
    assert (near.result, far.result, broken.result) == ("ok", "FAILED", "FAILED")
    assert "no such kernel" in broken.detail
    assert [exit_code(rows) for rows in ([near, skipped], [near, far])] == [0, 1]
    lines = table([near, far, broken, skipped]).splitlines()
    assert len(lines) == 4
    assert len({line.index(" s  ") for line in lines}) == 1, "columns are not aligned"
    assert "(limit 0.05)" in lines[1]
    assert lines[3].endswith("needs compute capability 10")


@pytest.mark.skipif(device.has_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_77() -> None:
    command = [sys.executable, "-m", "tools.gpu_check"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == EXIT_NO_GPU
    assert ended.stdout.startswith("no GPU")
    reason = why_not("blockwise")
    assert reason is not None
    assert "Transformer Engine" in reason


def test_on_a_cpu_its_comparisons_see_precision_and_recipes(tmp_path: Path, launch: Callable[..., None]) -> None:
    launch(Path(__file__).with_name("gpu_check_worker.py"), tmp_path, num_processes=1)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["same"] == 0.0
    assert 1e-4 < found["bfloat16"] < 0.1
    assert 0.02 < found["blockwise"] < 0.5
    results = [row[:2] for row in found["rows"]]
    assert results == [
        ["layers of plain torch / Transformer Engine, bfloat16", "skipped"],
        ["FP8 delayed hybrid, rehearsed / bfloat16", "ok"],
        ["FP8 delayed hybrid / rehearsed", "skipped"],
        ["FP8 tensorwise hybrid, rehearsed / bfloat16", "ok"],
        ["FP8 tensorwise hybrid / rehearsed", "skipped"],
        ["FP8 blockwise e4m3, rehearsed / bfloat16", "ok"],
        ["FP8 blockwise e4m3 / rehearsed", "skipped"],
        ["FP8 mxfp8 e4m3, rehearsed / bfloat16", "ok"],
        ["FP8 mxfp8 e4m3 / rehearsed", "skipped"],
    ]
