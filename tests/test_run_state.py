"""Which checkpoints stay, and what makes a checkpoint another run's."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from dppo_megatron import checkpoint_files
from dppo_megatron.config.schema import CheckpointingConfig, CheckpointSafetyConfig
from dppo_megatron.parallel.mesh import Axis
from dppo_megatron.run_state import RunState, fingerprint

ALONE = Axis("world", 1, 0, cast(Any, None), (0,))


def kept(directory: Path, metrics: list[float | None], *, top: int | None, higher: bool = True) -> list[int]:
    """The checkpoints that stand after one was published for each metric in turn, by steps done."""
    config = CheckpointingConfig(checkpoint_dir=str(directory), keep_top_k=top, higher_is_better=higher)
    state = RunState(config, CheckpointSafetyConfig(), fingerprint={})
    for number, metric in enumerate(metrics, start=1):
        pending = checkpoint_files.pending_path(directory, num_steps_done=number, writer=1)
        pending.mkdir(parents=True)
        (pending / "run_state.json").write_text(json.dumps({"metric": metric}))
        checkpoint_files.write_checksums(pending, checkpoint_files.sync_files(pending, rank=0, size=1))
        state.publish(pending, world=ALONE)
    return sorted(checkpoint_files.find_checkpoints(directory))


@pytest.mark.parametrize(
    ("metrics", "top", "higher", "expected"),
    [
        ([0.5, 0.9, 0.7, 0.1], 2, True, [2, 3, 4]),
        ([0.5, 0.9, 0.7, 0.1], 2, False, [1, 4]),
        ([0.5, 0.9, 0.7, 0.1], None, True, [1, 2, 3, 4]),
        ([0.1, 0.2, 0.3], 1, True, [3]),
        # A step without a validation has no metric: it stays only as the newest.
        ([0.5, None, 0.4, None], 1, True, [1, 4]),
        # Without any the newest stay.
        ([None, None, None], 2, True, [2, 3]),
    ],
)
def test_the_best_stay_and_always_the_newest(
    metrics: list[float | None], top: int | None, higher: bool, expected: list[int], tmp_path: Path
) -> None:
    assert kept(tmp_path, metrics, top=top, higher=higher) == expected


def test_where_and_how_fast_a_run_trains_is_not_what_it_trains() -> None:
    def of(**generation: object) -> dict[str, object]:
        effective = {"grpo": {"seed": 1}, "policy": {"generation": {"temperature": 1.0, **generation}}}
        return fingerprint(effective, architecture=CheckpointSafetyConfig(), data_digest=5)

    assert of(vllm_cfg={"gpu_memory_utilization": 0.5}, vllm_kwargs={"seed": 1}) == of(backend="vllm")
    assert of(temperature=0.9) != of()
