"""Run directories written by the run's own log and sample writer, for tests that read them."""

import io
from pathlib import Path

import yaml

from dppo_megatron import metric_names
from dppo_megatron.batches import FinishReason
from dppo_megatron.rl.replay import Sample, samples_path, write_samples
from dppo_megatron.run_log import RunLog
from dppo_megatron.run_records import StepRecord
from dppo_megatron.stage_clock import StageSeconds

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def a_step(step: int, *, accuracy: float | None = None, seconds: float = 2.0, tokens: int = 1000) -> StepRecord:
    """Half of the completions kept, a quarter of the tokens trained on."""
    return StepRecord(
        step=step,
        reward=0.2 + step / 100,
        accuracy=accuracy,
        kept_fraction=0.5,
        kept_prompts_fraction=0.75,
        rollout_tokens=tokens,
        train_tokens=tokens // 4,
        train_tokens_without_pruning=tokens * 2,
        loss=-0.01,
        grad_norm=1.5,
        learning_rate=1e-3,
        stage_seconds=StageSeconds(rollout=seconds * 0.75, update=seconds * 0.25, validation=5.0),
        extra=(
            (metric_names.EFFECTIVE_SAMPLE_SIZE, 10.0 + step),
            (metric_names.AUDIT_COSINE, 0.9),
            ("dppo/new", step % 3),
        ),
    )


def a_sample(index: int, *, reward: float, kept: bool, text: str = "2<eos>") -> Sample:
    """Completion ``index`` of the one prompt."""
    return Sample(
        prompt_id=7,
        occurrence=0,
        completion_index=index,
        prompt=f"1+1= {HOSTILE}",
        completion=text,
        answer="2",
        finish_reason=FinishReason.STOP,
        reward=reward,
        advantage=reward - 0.5,
        prompt_keep_probability=1.0,
        keep_probability=0.5,
        kept=kept,
        weight=2.0 if kept else 0.0,
        prompt_token_ids=(1, 2),
        token_ids=(3, 4),
        sampled_logprobs=(-0.1, -0.2),
    )


def write_run(
    directory: Path, *, accuracies: dict[int, float], seconds: float = 2.0, tokens: int = 1000, rate: float = 0.5
) -> Path:
    """Ten steps; accuracies: by step of the loop, -1 is the one before training."""
    with RunLog(directory, num_steps=10, tensorboard=False, console=io.StringIO()) as log:
        if -1 in accuracies:
            log.baseline(accuracies[-1])
        for step in range(10):
            log.step(a_step(step, accuracy=accuracies.get(step), seconds=seconds, tokens=tokens))
        log.warn("odd", f"an odd thing {HOSTILE}")
        log.warn("odd", "another odd thing")
        log.summary()
    config = {"grpo": {"max_num_steps": 10, "seed": 1}, "dppo": {"completion_pruning": {"rate": rate}}}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "config_origins.json").write_text('{"grpo.seed": "override grpo.seed=1"}')
    samples = [a_sample(0, reward=1.0, kept=True), a_sample(1, reward=1.0, kept=False)]
    samples += [a_sample(2, reward=0.0, kept=True, text=HOSTILE), a_sample(3, reward=0.0, kept=False)]
    for step in (0, 4, 9):
        write_samples(samples_path(directory, step=step), samples)
    return directory
