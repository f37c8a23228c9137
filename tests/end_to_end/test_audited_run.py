"""Runs of the quickstart with what the estimator offers: the audit, refill, GRESO, dynamic sampling."""

import json
from pathlib import Path

import pytest

from dppo_megatron import metric_names

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
WORKER = Path(__file__).with_name("run_worker.py")
NUM_STEPS = 6
AUDIT = "dppo.audit.period=1"
RUNS = {
    "plain": (),
    "audited": (AUDIT,),
    "top": (AUDIT, "dppo.completion_pruning.policy=top", "dppo.completion_pruning.rate=0.7"),
    "greso": (
        "dppo.prompt_pruning.policy=greso",
        "grpo.use_dynamic_sampling=true",
        "grpo.dynamic_sampling_max_gen_batches=40",
        "grpo.num_prompts_per_step=4",
        "policy.train_global_batch_size=16",
    ),
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, launch) -> dict[str, list[dict[str, float]]]:
    """Every run's metrics by step, without what a clock says."""
    root = tmp_path_factory.mktemp("audited")
    rows = (tiny_model / "data" / "train.jsonl").read_text().splitlines()[:24]
    (root / "train.jsonl").write_text("\n".join(rows))
    jobs = []
    for name, extra in RUNS.items():
        jobs.append(
            [
                str(QUICKSTART),
                f"policy.model_name={tiny_model}",
                f"logger.log_dir={root / name}",
                f"data.train.data_path={root}/train.jsonl",
                f"grpo.max_num_steps={NUM_STEPS}",
                "grpo.num_prompts_per_step=16",
                "policy.train_global_batch_size=64",  # two optimizer steps a rollout batch
                "grpo.val_at_start=false",
                "grpo.val_at_end=false",
                "checkpointing.enabled=false",
                "dppo.save_hf=false",
                "logger.tensorboard_enabled=false",
                "dppo.prompt_pruning.rate=0.5",
                "dppo.reward.function=partial_credit:score",
                *extra,
            ]
        )
    launch(WORKER, json.dumps(jobs), num_processes=1)
    result = {}
    for name in RUNS:
        read = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
        result[name] = [
            {key: value for key, value in one.items() if not key.startswith(("timing/", "performance/"))}
            for one in read
        ]
    return result


def test_the_audit_changes_nothing_in_the_training(lines: dict[str, list[dict[str, float]]]) -> None:
    audited = [{key: value for key, value in one.items() if "/audit/" not in key} for one in lines["audited"]]
    assert audited == lines["plain"]
    assert lines["plain"][-1][metric_names.KEPT_PROMPTS_FRACTION] < 1


def test_the_audit_sees_an_unbiased_estimator_and_a_biased_one(lines: dict[str, list[dict[str, float]]]) -> None:
    last = lines["audited"][-1]
    assert last[metric_names.AUDIT_MEAN_ERROR] < 2 * last[metric_names.AUDIT_STANDARD_ERROR]
    biased = lines["top"][-1]
    assert biased[metric_names.AUDIT_MEAN_ERROR] > 1.5 * biased[metric_names.AUDIT_STANDARD_ERROR]


def test_dynamic_sampling_trains_on_the_configured_number_of_whole_groups(
    lines: dict[str, list[dict[str, float]]],
) -> None:
    for one in lines["greso"]:
        assert one[metric_names.CANDIDATE_PROMPTS] == 4
        assert one[metric_names.DROPPABLE_COMPLETIONS] < 4 * 8


def test_every_step_logs_how_dense_and_how_level_its_rows_are(lines: dict[str, list[dict[str, float]]]) -> None:
    for one in lines["plain"]:
        assert one[metric_names.ROWS] >= 2  # one an optimizer step
        assert 0 < one[metric_names.SHARED_DENSITY] <= one[metric_names.PACKED_DENSITY] <= 1
        # On one process nothing asks for padding, and one rank is level.
        assert one[metric_names.TOKEN_DENSITY] == 1
        assert (one[metric_names.SEQUENCE_PADDING], one[metric_names.ROW_PADDING]) == (0, 0)
        assert (one[metric_names.TOKEN_IMBALANCE], one[metric_names.ATTENTION_IMBALANCE]) == (1, 1)
