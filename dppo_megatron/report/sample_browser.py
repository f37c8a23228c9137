"""The sample browser: what was asked, what was answered, and what pruning made of it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from dppo_megatron.report.run_data import RunData
from dppo_megatron.rl.replay import Sample

RIGHT_REWARD = 0.5
_MAX_STEPS, _MAX_SAMPLES, _MAX_CHARS = 12, 2400, 4000


def sample_browser(run: RunData) -> str:
    """HTML of the browser with its data; a hint where the run recorded no samples."""
    if not run.sample_files:
        return (
            '<p class="sub">No samples were recorded. Set <code>dppo.rollout.record_dir=${logger.log_dir}</code> '
            "to see completions here.</p>"
        )
    chosen = evenly(run.sample_files, count=_MAX_STEPS)
    steps = []
    for step, path in chosen:
        first = run.samples(path, max_groups=1)
        max_groups = max(1, _MAX_SAMPLES // len(chosen) // max(1, len(first[0]) if first else 1))
        groups = [_group(samples) for samples in run.samples(path, max_groups=max_groups)]
        steps.append({"step": step + 1, "groups": groups})
    # "</script>" and "<!--" in a completion must not end the element that holds the data.
    data = json.dumps(steps, ensure_ascii=False).replace("<", "\\u003c")
    total, shown = len(run.sample_files), len(chosen)
    extent = (
        f"{shown} of {total} recorded steps, the first prompts of each by prompt id; texts are cut at "
        f"{_MAX_CHARS:,} characters. Right: a reward of {RIGHT_REWARD} or more. Weight: 1 / (probability that the "
        "prompt and the completion were kept); 0 where dropped."
    )
    filters = "".join(
        f'<label><input type="checkbox" data-filter="{name}" checked> {name}</label>'
        for name in ("right", "wrong", "kept", "dropped")
    )
    return (
        f'<p class="sub">{extent}</p><div class="controls"><select id="sample-step"></select>{filters}'
        '<input type="search" id="sample-search" placeholder="search texts">'
        '<span class="sub" id="sample-count"></span></div><div id="sample-list"></div>'
        f'<script type="application/json" id="sample-data">{data}</script>'
    )


def evenly(items: Sequence[tuple[int, Path]], *, count: int) -> list[tuple[int, Path]]:
    """At most ``count`` items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(number * (len(items) - 1) / (count - 1))] for number in range(count)]


def _group(samples: Sequence[Sample]) -> dict[str, object]:
    first = samples[0]
    return {
        "prompt": _cut(first.prompt),
        "answer": first.answer,
        "p": f"{first.prompt_keep_probability:.3g}",
        "samples": [
            {
                "text": _cut(one.completion),
                "reward": f"{one.reward:.3g}",
                "advantage": f"{one.advantage:+.3f}",
                "weight": f"{one.weight:.2f}" if math.isfinite(one.weight) else "",
                "p": f"{one.keep_probability:.3g}",
                "end": one.finish_reason.name.lower(),
                "kept": one.kept,
                "right": one.reward >= RIGHT_REWARD,
            }
            for one in samples
        ],
    }


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + " [cut here]"
