"""Short quickstarts for the tests of whole runs, and what is compared of them."""

import json
from pathlib import Path

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
WORKER = Path(__file__).parents[1] / "end_to_end" / "run_worker.py"


def job(model: Path, run: Path, *, num_steps: int, extra: tuple[str, ...] = ()) -> list[str]:
    """A short quickstart that saves every two steps and prunes prompts too."""
    return [
        str(QUICKSTART),
        f"policy.model_name={model}",
        f"logger.log_dir={run}",
        f"data.train.data_path={run.parent}/train.jsonl",
        f"grpo.max_num_steps={num_steps}",
        "checkpointing.save_period=2",
        "checkpointing.keep_top_k=null",
        "grpo.val_period=2",
        "grpo.val_at_end=false",  # the run that stops half-way would validate where the whole one does not
        "grpo.max_val_samples=8",
        "dppo.prompt_pruning.enabled=true",
        "dppo.prompt_pruning.rate=0.3",
        "dppo.reward.function=partial_credit:score",
        "logger.tensorboard_enabled=false",
        *extra,
    ]


def write_prompts(model: Path, directory: Path) -> None:
    """Few prompts, so that pruning by history begins within the run."""
    rows = (model / "data" / "train.jsonl").read_text().splitlines()[:48]
    (directory / "train.jsonl").write_text("\n".join(rows))


def metrics(run: Path) -> list[dict[str, float]]:
    """What metrics.jsonl says, without what a clock says."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not key.startswith(("timing/", "performance/"))}
        for line in lines
    ]
