"""A step's samples as text."""

import textwrap
from collections.abc import Sequence

from dppo_megatron.report.run_data import RunData
from dppo_megatron.rl.replay import Sample, iterate_samples
from dppo_megatron.terminal_text import printable


def samples_text(run: RunData, *, step: int | None, count: int) -> str:
    """The best and the worst ``count`` completions of a step, and how many there were of each kind.

    step: steps done, from 1; None is the last recorded. Order: by reward, then by advantage.
    Raises: ValueError for a step that was not recorded and for a count below 1.
    """
    files = dict(run.sample_files)
    if not files:
        raise ValueError(
            f"RUN: {run.directory} has no samples; record them with dppo.rollout.record_dir=${{logger.log_dir}}"
        )
    if count < 1:
        raise ValueError(f"--count: {count}; allowed: 1 or more")
    wanted = max(files) if step is None else step - 1
    if wanted not in files:
        raise ValueError(f"--step: {step} was not recorded; there are {min(files) + 1} to {max(files) + 1}")
    samples = sorted(iterate_samples(files[wanted]), key=lambda one: (-one.reward, -one.advantage))
    kept = sum(one.kept for one in samples)
    mean = sum(one.reward for one in samples) / len(samples)
    head = f"step {wanted + 1}: {len(samples)} completions, mean reward {mean:.3f}, {kept} kept for training"
    best, worst = samples[:count], samples[count:][-count:][::-1]
    return "\n\n".join([head, "best", *_blocks(best), "worst", *_blocks(worst)]) + "\n"


def _blocks(samples: Sequence[Sample]) -> list[str]:
    return [_block(sample) for sample in samples]


def _block(sample: Sample) -> str:
    kept = f"kept, weight {sample.weight:.2f}" if sample.kept else "dropped"
    facts = (
        f"reward {sample.reward:.3g}  advantage {sample.advantage:+.3f}  {kept}  keep probability "
        f"{sample.prompt_keep_probability:.3g} x {sample.keep_probability:.3g}  {sample.finish_reason.name.lower()}  "
        f"{len(sample.token_ids)} tokens"
    )
    texts = (("prompt", sample.prompt), ("completion", sample.completion), ("answer", sample.answer))
    return "\n".join([facts, *(f"  {name:<11}{_indented(text)}" for name, text in texts)])


def _indented(text: str) -> str:
    return textwrap.indent(printable(text), " " * 13).lstrip(" ")
