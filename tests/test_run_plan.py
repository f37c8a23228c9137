"""Claims about dppo plan: what it says of the examples, how fast, and what it refuses."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dppo_megatron.config.schema import CompletionPruningConfig, DppoConfig, PromptPruningConfig
from dppo_megatron.plan import Layout
from dppo_megatron.plan_text import plan_json, plan_text
from dppo_megatron.run_plan import RunPlan, examine_run, expected_savings, launch_commands, make_plan, ranks_of

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.yaml") if "base" not in path.name)
MATH = str(ROOT / "examples" / "math-qwen3-8b.yaml")


def plan_of(path: str, *overrides: str) -> RunPlan:
    found = examine_run(path, overrides)
    assert found.errors == ()
    return make_plan(found, path=path, overrides=overrides)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_has_a_plan(path: Path) -> None:
    plan = plan_of(str(path))
    assert plan.warnings == () or path.name == "quickstart.yaml"
    if path.name != "evaluation.yaml":  # which trains nothing
        assert plan.savings.trained == pytest.approx(0.7 * 0.5)
    assert json.loads(json.dumps(plan_json(plan)))["layout"]["world_size"] == plan.layout.world_size


def test_the_papers_setting_is_told_as_it_is() -> None:
    plan = plan_of(MATH)
    text = plan_text(plan)
    assert "Qwen/Qwen3-8B, sizes from the table of public models" in text
    assert "8 processes: 2 tensor and sequence-parallel x 1 context- x 4 data- x 1 pipeline-parallel" in text
    assert "128 prompts x 5 completions = 640; 1 optimizer step a rollout batch: on-policy" in text
    peak = max(stage.peak for stage in plan.memory) / 2**30
    assert f"{peak:4.1f}" in text


def test_ranks_are_in_megatron_s_order() -> None:
    ranks = ranks_of(Layout(tp=2, pp=2, cp=2, dp=2, sequence_parallel=True), gpus_per_node=8)
    assert [(one.tp, one.cp, one.dp, one.pp) for one in ranks[:5]] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (1, 1, 0, 0),
        (0, 0, 1, 0),
    ]
    assert [one.pp for one in ranks] == [0] * 8 + [1] * 8
    assert [one.node for one in ranks] == [0] * 8 + [1] * 8


def test_savings_are_the_product_of_the_rates_of_what_is_enabled() -> None:
    both = DppoConfig(
        prompt_pruning=PromptPruningConfig(rate=0.25), completion_pruning=CompletionPruningConfig(rate=0.5)
    )
    assert expected_savings(both).trained == 0.375
    assert expected_savings(both).rollouts == 0.75
    assert expected_savings(both).variance_factor == pytest.approx(1 / 0.375)
    assert expected_savings(DppoConfig(enabled=False)).trained == 1
    assert expected_savings(DppoConfig(prompt_pruning=PromptPruningConfig(enabled=False))).rollouts == 1


def test_a_padding_that_the_layout_raises_is_told() -> None:
    overrides = ("policy.megatron_cfg.context_parallel_size=2", "policy.make_sequence_length_divisible_by=3")
    plan = plan_of(MATH, *overrides)
    assert plan.padding.sequence == 12
    assert "divisible_by = 3 was raised" in plan_text(plan)


def test_several_machines_are_launched_by_slurm_alone() -> None:
    one = launch_commands("x.yaml", ["grpo.seed=1"], gpus_per_node=8, num_nodes=1)
    assert one[0] == "dppo train x.yaml grpo.seed=1"
    (slurm,) = launch_commands("x.yaml", [], gpus_per_node=8, num_nodes=4)
    assert slurm.startswith("sbatch --nodes=4 --ntasks-per-node=8")
    assert "srun dppo train x.yaml" in slurm


def test_a_model_that_cannot_be_trained_or_cut_is_an_error_at_its_line() -> None:
    (error,) = examine_run(MATH, ["policy.model_name=Qwen/Qwen3-30B-A3B"]).errors
    assert (error.key, error.value) == ("policy.model_name", "Qwen/Qwen3-30B-A3B")
    assert "qwen3_moe" in error.reason
    errors = examine_run(MATH, ["policy.megatron_cfg.pipeline_model_parallel_size=8", "cluster.num_nodes=2"]).errors
    assert [error.key for error in errors] == ["policy.megatron_cfg.pipeline_model_parallel_size"]
    assert "36 layers" in errors[0].reason


def test_interleaved_stages_are_told_and_refused_where_they_do_not_divide() -> None:
    pp2 = ("policy.megatron_cfg.pipeline_model_parallel_size=2", "cluster.num_nodes=2")
    text = plan_text(plan_of(MATH, *pp2, "dppo.virtual_pipeline_stages=3"))
    assert "2 pipeline-parallel of 3 interleaved chunks" in text
    assert "rows in groups of 2" in text
    errors = examine_run(MATH, [*pp2, "dppo.virtual_pipeline_stages=4"]).errors
    assert [error.key for error in errors] == ["dppo.virtual_pipeline_stages"]
    assert "18 layers" in errors[0].reason
    errors = examine_run(MATH, ["dppo.virtual_pipeline_stages=2"]).errors
    assert [error.key for error in errors] == ["dppo.virtual_pipeline_stages"]
    assert "pipeline_model_parallel_size of at least 2" in errors[0].reason


def test_a_model_of_unknown_size_is_a_warning_and_its_memory_is_left_out() -> None:
    plan = plan_of(MATH, "policy.model_name=someone/something")
    assert [warning.key for warning in plan.warnings] == ["policy.model_name"]
    assert plan.memory == ()
    assert "not estimated" in plan_text(plan)


def test_planning_and_helping_take_no_torch_and_little_time() -> None:
    program = (
        "import sys; from dppo_megatron.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)"
    )
    for arguments, seconds in ((["plan", MATH], 2.0), (["config", "check", MATH], 2.0), (["--help"], 0.5)):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Processor time, which other work on the machine does not stretch.
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < seconds, arguments
