"""Claims about honoured keys: each is read by something that runs, or may hold one value only."""

import ast
from pathlib import Path

import pytest

from dppo_megatron.config.loader import examine, load_config
from dppo_megatron.config.rules import _NOT_YET
from dppo_megatron.config.sections import schema_leaves

PACKAGE = Path(__file__).parents[2] / "dppo_megatron"
MINIMAL = "policy: {model_name: some/model}\ndata:\n  train: {data_path: train.jsonl}\n"
READ = {
    node.attr
    for path in PACKAGE.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Attribute)
}


@pytest.mark.parametrize("key", schema_leaves())
def test_a_honoured_key_is_read_or_held_to_one_value(key: str) -> None:
    name = key.rpartition(".")[2]
    assert key in _NOT_YET or name in READ, f"nothing reads {key}"


# Keys that may hold one value, or that another must agree with: the other value is refused.
@pytest.mark.parametrize(
    "override",
    [
        "policy.generation.top_p=0.9",
        "policy.generation.top_k=5",
        "policy.generation.backend=megatron",
        "policy.sequence_packing.enabled=false",
        "policy.megatron_cfg.enabled=false",
        "policy.megatron_cfg.pipeline_dtype=float32",
        "policy.megatron_cfg.optimizer.clip_grad=0.5",
        "checkpointing.metric_name=val:total_reward/mean",
        "data.default.split_validation_size=1.5",
    ],
)
def test_a_key_that_holds_one_value_refuses_another(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    errors = examine(path, [override]).errors
    assert override.partition("=")[0].replace("data.default", "data.train") in {error.key for error in errors}


@pytest.mark.parametrize("metric", ["val:accuracy", None])
def test_checkpoints_are_ranked_by_accuracy_or_by_nothing(tmp_path: Path, metric: str | None) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    config = load_config(path, [f"checkpointing.metric_name={metric or 'null'}"]).config
    assert config.checkpointing.metric_name == metric
    assert not examine(path, [f"checkpointing.metric_name={metric or 'null'}"]).errors
