"""What training holds makes way for rollouts and comes back as it was."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from toy_step import make_model

from dppo_megatron.config.schema import (
    Config,
    DataConfig,
    DppoConfig,
    PolicyConfig,
    RolloutConfig,
    TrainDatasetConfig,
)
from dppo_megatron.parallel.set_aside import training_state_set_aside
from dppo_megatron.plan import sets_training_aside


class Told:
    """Model and optimizer in one, noting what they are told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.said.append(name)


def test_it_goes_before_the_rollouts_and_is_back_after_them_however_they_end() -> None:
    for fails in (False, True):
        told = Told()
        try:
            with training_state_set_aside([told], told):
                told.said.append("rollouts")
                if fails:
                    raise RuntimeError("an engine failed")
        except RuntimeError:
            assert fails
        order = ["zero_grad", "offload_grad_buffers", "offload_to_cpu", "rollouts"]
        assert told.said == [*order, "restore_from_cpu", "restore_grad_buffers"]


@pytest.mark.parametrize(
    ("engine", "precision", "wanted"),
    [
        ("vllm", "bfloat16", True),
        ("auto", "bfloat16", True),
        ("vllm", "float32", False),
        ("embedded", "bfloat16", False),
    ],
)
def test_only_vllm_beside_main_parameters_asks_for_it(engine, precision, wanted: bool) -> None:
    config = Config(
        policy=PolicyConfig(model_name="m", precision=precision),
        data=DataConfig(train=TrainDatasetConfig(data_path="d")),
        dppo=replace(DppoConfig(), rollout=RolloutConfig(engine=engine)),
    )
    assert sets_training_aside(config) is wanted


def test_training_goes_on_bit_for_bit_and_the_gradients_memory_was_free(
    tmp_path: Path, launch: Callable[..., None]
) -> None:
    make_model(tmp_path / "model", tied=False)
    launch(Path(__file__).with_name("set_aside_worker.py"), tmp_path / "model", tmp_path / "out", num_processes=1)
    found = json.loads((tmp_path / "out").read_text())
    assert set(found) == {"sharded False", "sharded True"}
    for one in found.values():
        before, during, after = one["bytes"]
        assert before == after > 0
        assert during == 0
        assert one["same"]
