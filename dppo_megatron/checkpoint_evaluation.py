"""Evaluation of a checkpoint or a Hugging Face model on data sets: what ``dppo eval`` does on every rank."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.atomic_file import atomic_write_text
from dppo_megatron.batches import FinishReason, PromptBatch, Purpose, Sampling
from dppo_megatron.config.loader import LoadedConfig
from dppo_megatron.config.schema import Config, DatasetConfig
from dppo_megatron.model_source import find_model, read_model_config
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.checkpoint import load_policy
from dppo_megatron.parallel.mesh import Mesh, open_mesh
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.plan import Layout
from dppo_megatron.report.grid import Grid
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.generator import Generator
from dppo_megatron.rl.math_answers import extract_answer
from dppo_megatron.rl.pass_at_k import Estimate, estimate, majority_at_k, pass_at_k
from dppo_megatron.rl.prompts import PromptDataset, load_prompts, validation_batch
from dppo_megatron.rl.rewards import MathReward, Reward, make_reward, score_rollouts
from dppo_megatron.run_setup import Inputs, find_stop_token_ids, make_generator

RIGHT_REWARD = 0.5
FIGURES_FILE = "evaluation.json"


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """One completion of an evaluation. extracted: what votes in maj@k; None where no answer was found."""

    prompt_id: int
    occurrence: int
    index: int
    prompt: str
    answer: str
    completion: str
    extracted: str | None
    reward: float
    finish_reason: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DatasetFigures:
    """What an evaluation found on one data set. passes, majorities: (k, estimate). Lengths in tokens."""

    name: str
    num_prompts: int
    num_samples: int
    passes: tuple[tuple[int, Estimate], ...]
    majorities: tuple[tuple[int, Estimate], ...]
    mean_length: float
    stop_fraction: float


def run_evaluation(
    loaded: LoadedConfig, layout: Layout, *, model: str, temperature: float | None, output: Path
) -> tuple[DatasetFigures, ...]:
    """Evaluate ``model`` on every data set; the first rank writes samples and figures into ``output``.

    model: a Hugging Face directory or hub name, or a run's checkpoint ``step_N``, whose architecture and tokenizer
    are those of policy.model_name. temperature: None takes the configuration's. Called by every rank; the figures
    are equal on all. Raises ValueError for what the user has to mend.
    """
    config = loaded.config
    checkpoint = Path(model) if (Path(model) / "run_state.json").is_file() else None
    source = find_model(config.policy.model_name if checkpoint else model)
    tokenizer_name = config.policy.tokenizer.name
    own = tokenizer_name == config.policy.model_name
    tokenizer = AutoTokenizer.from_pretrained(source if own else find_model(tokenizer_name))
    datasets = {
        name: load_prompts(
            dataset,
            tokenizer=tokenizer,
            tokenizer_config=config.policy.tokenizer,
            max_prompt_tokens=config.policy.max_total_sequence_length - 1,
        )
        for name, dataset in dataset_configs(config)
    }
    inputs = Inputs(
        source=source,
        architecture=read_architecture(read_model_config(source)),
        tokenizer=tokenizer,
        train=next(iter(datasets.values())),
        validation=None,
        stop_token_ids=find_stop_token_ids(config, tokenizer, source),
    )
    sampling = Sampling(
        num_generations=config.dppo.evaluation.num_generations,
        temperature=config.policy.generation.temperature if temperature is None else temperature,
        max_new_tokens=config.policy.generation.max_new_tokens,
        stop_token_ids=inputs.stop_token_ids,
        purpose=Purpose.VALIDATION,
    )
    with (
        open_mesh(layout, seed=config.grpo.seed) as mesh,
        contextlib.closing(make_generator(config, inputs, mesh=mesh)) as generator,
    ):
        rehearse = config.dppo.fp8_emulate
        policy = Policy(config.policy, inputs.architecture, source=source, mesh=mesh, rehearse_fp8=rehearse)
        if checkpoint:
            load_policy(policy, checkpoint / "policy")
        generator.load_weights(policy.hf_weights(engine_tp=generator.tensor_parallel_size), version=0)
        del policy  # its memory is the engine's now
        found = _evaluate_all(
            config, inputs, datasets, generator=generator, sampling=sampling, mesh=mesh, output=output
        )
        if mesh.world.is_first:
            settings = {"model": model, "temperature": sampling.temperature, "seed": config.grpo.seed}
            text = json.dumps(settings | {"datasets": [asdict(one) for one in found]}, indent=2)
            atomic_write_text(output / FIGURES_FILE, text + "\n")
    return found


def dataset_configs(config: Config) -> tuple[tuple[str, DatasetConfig], ...]:
    """The data sets to evaluate on: name, and how to read it.

    Raises ValueError where the configuration names none, or a path that is no text.
    """
    base = config.data.validation or config.data.train
    named = config.dppo.evaluation.datasets
    if not named:
        if config.data.validation is None:
            raise ValueError("dppo.evaluation.datasets: null, and there is no data.validation; name a JSONL file")
        return (("validation", config.data.validation),)
    for name, path in named.items():
        if not isinstance(path, str):
            raise ValueError(f"dppo.evaluation.datasets.{name}: {path!r}; allowed: the path of a JSONL file")
    return tuple((name, replace(base, data_path=path, dataset_name=None)) for name, path in named.items())


def _evaluate_all(
    config: Config,
    inputs: Inputs,
    datasets: dict[str, PromptDataset],
    *,
    generator: Generator,
    sampling: Sampling,
    mesh: Mesh,
    output: Path,
) -> tuple[DatasetFigures, ...]:
    axis = mesh.generation
    if mesh.world.is_first:
        output.mkdir(parents=True, exist_ok=True)
    found = []
    reward = make_reward(config.data.train.env_name, reward=config.dppo.reward, env=config.env)
    try:
        for name, dataset in datasets.items():
            prompts = validation_batch(dataset, max_samples=len(dataset))
            share = prompts.share(rank=axis.rank, size=axis.size)
            mine = _sample(config, inputs, share, generator=generator, sampling=sampling, reward=reward)
            parts = collectives.gather_objects(mine, axis)
            samples = sorted((one for part in parts for one in part), key=lambda one: _key(one))
            if mesh.world.is_first:
                lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in samples)
                atomic_write_text(output / f"{name}.jsonl", lines)
            found.append(figures(name, samples, num_samples=sampling.num_generations))
    finally:
        reward.close()
    return tuple(found)


def _key(sample: EvaluatedSample) -> tuple[int, int, int]:
    return sample.prompt_id, sample.occurrence, sample.index


def _sample(
    config: Config, inputs: Inputs, prompts: PromptBatch, *, generator: Generator, sampling: Sampling, reward: Reward
) -> list[EvaluatedSample]:
    rollouts = generator.generate(prompts, Draws(config.grpo.seed, 0), sampling)
    rewards = score_rollouts(rollouts, reward=reward, tokenizer=inputs.tokenizer)
    device.synchronize()
    rows = [rollouts.completions[row].tolist() for row in range(len(rollouts.completions))]
    texts = inputs.tokenizer.batch_decode(rows, skip_special_tokens=True)
    samples = []
    for row, text in enumerate(texts):
        prompt, index = divmod(row, sampling.num_generations)
        votes = extract_answer(text, max_answer_chars=config.dppo.reward.max_answer_chars)
        samples.append(
            EvaluatedSample(
                prompt_id=int(prompts.prompt_ids[prompt]),
                occurrence=int(prompts.occurrences[prompt]),
                index=index,
                prompt=prompts.texts[prompt],
                answer=prompts.answers[prompt],
                completion=text,
                extracted=votes if isinstance(reward, MathReward) else text,
                reward=float(rewards[row]),
                finish_reason=FinishReason(rollouts.finish_reasons[row]).name.lower(),
                num_tokens=len(rows[row]),
            )
        )
    return samples


def figures(name: str, samples: Sequence[EvaluatedSample], *, num_samples: int) -> DatasetFigures:
    """pass@k and maj@k for k = 1, 2, 4, ... and ``num_samples``, of samples sorted by prompt, ``num_samples`` each.

    A sample is right with a reward of at least RIGHT_REWARD.
    """
    right = np.array([one.reward >= RIGHT_REWARD for one in samples], np.float64).reshape(-1, num_samples)
    rows = [samples[start : start + num_samples] for start in range(0, len(samples), num_samples)]
    answers = [[None if one.extracted is None else " ".join(one.extracted.split()) for one in row] for row in rows]
    num_right = right.sum(axis=1).astype(np.int64)
    ks = sorted({2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples} | {num_samples})
    return DatasetFigures(
        name=name,
        num_prompts=len(rows),
        num_samples=num_samples,
        passes=tuple(
            (k, estimate(pass_at_k(num_right, num_samples=num_samples, k=k), num_samples=num_samples)) for k in ks
        ),
        majorities=tuple((k, estimate(majority_at_k(answers, right=right, k=k), num_samples=1)) for k in ks if k > 2),
        mean_length=float(np.mean([one.num_tokens for one in samples])),
        stop_fraction=float(np.mean([one.finish_reason == "stop" for one in samples])),
    )


def figures_text(found: Sequence[DatasetFigures]) -> str:
    """A table, percentages with 95 % intervals."""
    first = found[0]
    headings = ["data set", "prompts", "samples"]
    headings += [f"pass@{k}" for k, _ in first.passes] + [f"maj@{k}" for k, _ in first.majorities]
    headings += ["tokens", "stopped"]
    rows = []
    for one in found:
        cells = [_interval(value) for _, value in (*one.passes, *one.majorities)]
        ends = (f"{one.mean_length:.1f}", f"{100 * one.stop_fraction:.1f}%")
        rows.append((one.name, str(one.num_prompts), str(one.num_samples), *cells, *ends))
    return Grid("percent right, with 95 % intervals over prompts", tuple(headings), tuple(rows)).text() + "\n"


def _interval(value: Estimate) -> str:
    return f"{100 * value.value:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"
