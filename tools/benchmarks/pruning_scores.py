"""Which score should pruning follow? Added variance of candidate scores on real gradients of real policies.

python -m tools.benchmarks.pruning_scores --models quickstart smollm2 [--json scores.json]

Samples completions of the quickstart's model at the start, after 30 and after 100 steps of its training, and of
SmolLM2-135M-Instruct on two tasks (packages: see tools/smollm2_round_trip.py), takes the exact gradient
of every completion's loss term, and prints for every score s the added variance sum (1 / p - 1) |g|^2 of keep
probabilities clip(c s, 0.05, 1) over that of s = |A|, at equal expected numbers of kept completions and of kept
tokens (prompt and completion: what an update computes). Completions of advantage 0 are dropped before, for all.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from dppo_megatron.batches import FloatArray
from dppo_megatron.rl.keep_probabilities import neyman
from tools.benchmarks.gradient_norms import Completions, Task, measure
from tools.smollm2_round_trip import unpack

LEAST = 0.05
MEANS = ("sequence", "token")
BASE = "A"
Score = Callable[[Completions, FloatArray], FloatArray]

SCORES: dict[str, Score] = {
    BASE: lambda c, d: c.sizes,
    "A / L": lambda c, d: c.sizes / c.lengths,
    "A / sqrt L": lambda c, d: c.sizes / np.sqrt(c.lengths),
    "A sqrt L": lambda c, d: c.sizes * np.sqrt(c.lengths),
    "A L": lambda c, d: c.sizes * c.lengths,
    "A sum(1-p) / D": lambda c, d: c.sizes * c.rest_sums / d,
    "A norm(1-p) / D": lambda c, d: c.sizes * c.rest_roots / d,
    "A surprisal / D": lambda c, d: c.sizes * c.surprisals / d,
    "A norm(logits' gradient) / D": lambda c, d: c.sizes * c.output_norms / d,
    "A norm(output layer's gradient) / D": lambda c, d: c.sizes * c.output_layer_norms / d,
    "A norm(gradient) / D: oracle": lambda c, d: c.sizes * c.norms / d,
    "A / sqrt cost": lambda c, d: c.sizes / np.sqrt(c.costs),
    "A norm(1-p) / D / sqrt cost": lambda c, d: c.sizes * c.rest_roots / d / np.sqrt(c.costs),
    "A norm(gradient) / D / sqrt cost: oracle": lambda c, d: c.sizes * c.norms / d / np.sqrt(c.costs),
}
"""Scores of completions. A: the advantage's size. L: completion tokens; cost: with the prompt's. p: the sampled
tokens' probabilities, which the sampler knows. D: what the loss divides a completion by: L for the sequence mean, 1
for the token mean. The gradients by the logits and by the output layer's weight are known after a pass that keeps
logits, the oracle's not before the training pass."""


@dataclass(frozen=True, slots=True)
class Line:
    """One score on one policy: added variance over sum |g|^2, at equal kept completions and at equal kept tokens."""

    policy: str
    mean: str
    kept: float
    score: str
    at_equal_completions: float
    at_equal_tokens: float


def added_variance(batch: Completions, *, divisors: FloatArray, probabilities: FloatArray) -> float:
    """Independent draws' sum (1 / p - 1) |g|^2 over sum |g|^2 of a batch."""
    squares = (batch.sizes * batch.norms / divisors) ** 2
    return float(((1 / probabilities - 1) * squares).sum() / squares.sum())


def at_equal_tokens(scores: FloatArray, costs: FloatArray, *, kept: float) -> FloatArray:
    """Keep probabilities by the scores that keep the fraction ``kept`` of the tokens, by bisection on the rate."""
    low, high = 0.0, 1 - LEAST
    for _ in range(50):
        rate = (low + high) / 2
        probabilities = neyman(scores, rate=rate, min_keep_probability=LEAST)
        low, high = (rate, high) if probabilities @ costs > kept * costs.sum() else (low, rate)
    return neyman(scores, rate=low, min_keep_probability=LEAST)


def lines_of(policy: str, batches: Sequence[Completions], *, fractions: Sequence[float]) -> list[Line]:
    """All scores, means of the batches."""
    result = []
    for mean in MEANS:
        for kept in fractions:
            for name, score in SCORES.items():
                pairs = []
                for batch in batches:
                    divisors = batch.lengths if mean == "sequence" else np.ones(len(batch))
                    scores = score(batch, divisors)
                    designs = (
                        neyman(scores, rate=1 - kept, min_keep_probability=LEAST),
                        at_equal_tokens(scores, batch.costs, kept=kept),
                    )
                    pairs.append([added_variance(batch, divisors=divisors, probabilities=p) for p in designs])
                result.append(Line(policy, mean, kept, name, *np.mean(pairs, axis=0).tolist()))
    return result


def table(lines: Sequence[Line], *, mean: str, kept: float, equal: str) -> str:
    """Rows are scores, columns policies: the variance over that of |A|, whose own stands in the first row."""
    chosen = {
        (line.score, line.policy): line.at_equal_completions if equal == "completions" else line.at_equal_tokens
        for line in lines
        if line.mean == mean and line.kept == kept
    }
    policies = list(dict.fromkeys(line.policy for line in lines))
    rows = [f"{mean} mean, {kept:g} of the {equal} kept", f"| score | {' | '.join(policies)} |"]
    rows += ["|---|" + "---|" * len(policies)]
    rows += [f"| added variance of {BASE} | {' | '.join(f'{chosen[BASE, one]:.3f}' for one in policies)} |"]
    for score in list(SCORES)[1:]:
        rows += [f"| {score} | {' | '.join(f'{chosen[score, p] / chosen[BASE, p]:.2f}' for p in policies)} |"]
    return "\n".join(rows) + "\n"


def _equal(_: str, text: str, answer: str) -> float:
    """1 for the right answer."""
    return float(text == answer)


def quickstart_policies(tiny: Path, work: Path, *, num_prompts: int) -> dict[str, tuple[Path, Task]]:
    """The quickstart's model at three points of its training, on its own task and reward."""
    stop = AutoTokenizer.from_pretrained(tiny).eos_token_id
    task = Task(tiny / "data" / "train.jsonl", _equal, (stop,), 9, num_prompts)
    policies = {"quickstart, start": (tiny, task)}
    for steps in (30, 100):
        run = work / f"steps_{steps}"
        command = [sys.executable, "-m", "dppo_megatron", "train", "examples/quickstart.yaml"]
        command += [f"grpo.max_num_steps={steps}", f"policy.model_name={tiny}", f"logger.log_dir={run}"]
        command += ["checkpointing.enabled=false", "logger.tensorboard_enabled=false"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        policies[f"quickstart, {steps} steps"] = (run / "hf", task)
    return policies


def _places(_: str, text: str, answer: str) -> float:
    """Numbers in their right places, over the longer list."""
    mine, theirs = text.strip().split(), answer.split()
    return sum(a == b for a, b in zip(mine, theirs, strict=False)) / max(len(mine), len(theirs))


def _words(_: str, text: str, answer: str) -> float:
    """The fraction of wanted words that stand in the text."""
    wanted = answer.split()
    return sum(word in text.lower() for word in wanted) / len(wanted)


def smollm2_policies(work: Path, *, num_prompts: int) -> dict[str, tuple[Path, Task]]:
    """SmolLM2 on two tasks with partial credit: sorting numbers after three examples, a sentence with four words."""
    model = work / "smollm2"
    unpack(model)
    rng = np.random.default_rng(0)
    shots = "sort: 4 1 3\nsorted: 1 3 4\nsort: 9 2 7 5\nsorted: 2 5 7 9\nsort: 8 6 1 3 2\nsorted: 1 2 3 6 8\n"
    lists = [rng.permutation(10)[: rng.integers(3, 8)].tolist() for _ in range(num_prompts)]
    numbers = [
        {"input": f"{shots}sort: {' '.join(map(str, one))}\nsorted:", "output": " ".join(map(str, sorted(one)))}
        for one in lists
    ]
    nouns = [
        "river",
        "bread",
        "lamp",
        "garden",
        "winter",
        "teacher",
        "bicycle",
        "letter",
        "mountain",
        "kitchen",
        "stone",
        "song",
    ]
    verbs = ["carry", "paint", "break", "follow", "forget", "repair"]
    sentences = []
    for _ in range(num_prompts):
        words = [*rng.choice(nouns, 3, replace=False), rng.choice(verbs)]
        text = f"Write one short sentence with the words {', '.join(words)}."
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        sentences.append({"input": prompt, "output": " ".join(words)})
    for name, rows in (("numbers", numbers), ("sentences", sentences)):
        (work / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    # Token 198 ends a line, 2 a turn.
    base = Task(work / "numbers.jsonl", _places, (2, 198), 16, num_prompts)
    return {
        "SmolLM2, numbers": (model, base),
        "SmolLM2, sentences": (model, replace(base, data=work / "sentences.jsonl", score=_words, max_new_tokens=48)),
    }


def main() -> None:
    """Measure, print the tables, and write every line where --json says, as policies are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["quickstart", "smollm2"], default=["quickstart"])
    parser.add_argument("--tiny", type=Path, default=Path("models/tiny-sort"), help="tools/make_tiny_model.py's")
    parser.add_argument("--prompts", type=int, default=256, help="of the quickstart, in batches of 32")
    parser.add_argument("--smollm2-prompts", type=int, default=24, help="of each task, in batches of 32")
    parser.add_argument("--kept", type=float, nargs="+", default=[0.3, 0.5, 0.7], help="expected fractions")
    parser.add_argument("--json", type=Path, help="file for every line")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    logging.getLogger("dppo_megatron").setLevel(logging.ERROR)  # of repeated prompts
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as temporary:
        work, policies = Path(temporary), {}
        if "quickstart" in options.models:
            policies |= quickstart_policies(options.tiny, work, num_prompts=options.prompts)
        if "smollm2" in options.models:
            policies |= smollm2_policies(work, num_prompts=options.smollm2_prompts)
        for name, (directory, task) in policies.items():
            batches = [one for one in measure(directory, task, num_generations=8, batch_size=32) if len(one)]
            lines += lines_of(name, batches, fractions=options.kept)
            print(_counts(name, batches), file=sys.stderr)
            if options.json:
                text = json.dumps([asdict(line) for line in lines], indent=1)
                options.json.write_text(text + "\n", encoding="utf-8")
    for mean in MEANS:
        for kept in options.kept:
            for equal in ("completions", "tokens"):
                print(table(lines, mean=mean, kept=kept, equal=equal))


def _counts(name: str, batches: Sequence[Completions]) -> str:
    numbers = ", ".join(str(len(one)) for one in batches)
    lengths = np.concatenate([one.lengths for one in batches])
    return f"{name}: {numbers} completions with an advantage, {lengths.mean():.1f} ± {lengths.std():.1f} tokens"


if __name__ == "__main__":
    main()
