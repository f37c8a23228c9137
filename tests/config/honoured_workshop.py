"""What a configuration builds, for the table of honoured keys: real objects and what they do, never the sections."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from dppo_megatron import device, stages
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import FinishReason, PackedRow, PromptBatch, Ragged, ScoredBatch
from dppo_megatron.checkpoint_files import find_checkpoints
from dppo_megatron.config.loader import Examination, LoadedConfig, require_config
from dppo_megatron.parallel import policy as policy_module
from dppo_megatron.parallel.mesh import Mesh, lay_out
from dppo_megatron.parallel.model import transformer_config
from dppo_megatron.parallel.sequence_sums import SequenceSums
from dppo_megatron.plan_text import plan_json
from dppo_megatron.rl import vllm_engine
from dppo_megatron.rl.advantages import group_advantages
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.loss import PolicyLoss
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.pruning import Pruning, prompt_keep_probabilities, prune_completions, prune_prompts
from dppo_megatron.rl.reward_shaping import shape_rewards
from dppo_megatron.run_plan import make_plan
from dppo_megatron.run_setup import Run, read_inputs, set_up
from dppo_megatron.stop_request import StopRequest

BASE = """
policy:
  model_name: {model}
  tokenizer: {{chat_template: null}}
  precision: float32
  train_global_batch_size: 16
  max_total_sequence_length: 16
  sequence_packing: {{train_mb_tokens: 64}}
  generation: {{max_new_tokens: 6}}
data:
  train: {{data_path: {folder}/rows.jsonl}}
  validation: {{data_path: {folder}/rows.jsonl}}
  default: {{}}
grpo: {{num_prompts_per_step: 8, num_generations_per_prompt: 2, max_num_steps: 4, val_period: 0}}
loss_fn: {{reference_policy_kl_penalty: 0.0, token_level_loss: false}}
checkpointing: {{checkpoint_dir: {folder}/none}}
logger: {{log_dir: {folder}/logs}}
dppo: {{prompt_pruning: {{enabled: true}}, completion_pruning: {{enabled: true}}}}
"""
NUM_ROWS = 32


class Workshop:
    """Builds what configurations ask for, on one process. ``folder``: inputs, and where runs write."""

    def __init__(self, folder: Path, model: Path, mesh: Mesh) -> None:
        self.folder, self.model, self.mesh = folder, model, mesh
        self.architecture = read_architecture(json.loads((model / "config.json").read_text()))
        (folder / "run.yaml").write_text(BASE.format(model=model, folder=folder))
        texts = [str(n) + "1" * (n % 3) for n in range(20, 20 + NUM_ROWS)]
        rows = [{"input": f"{n}=", "output": n, "question": f"{n}0=", "solution": f"{n}0"} for n in texts]
        lines = [json.dumps(row) + "\n" for row in rows]
        for name in ("rows", "gsm8k"):
            (folder / f"{name}.jsonl").write_text("".join(lines))
        for name in ("others", "gsm8k-test", "math"):
            (folder / f"{name}.jsonl").write_text("".join(lines[::-1]))
        shutil.copytree(model, folder / "copy")
        (folder / "twice.txt").write_text("1{}")
        (folder / "system.txt").write_text("2")
        (folder / "template.jinja").write_text("{% if shout %}3{% endif %}{{ messages[-1]['content'] }}")

    def lay_out(self) -> None:
        """Lay the mesh out again, which a whole run takes down at its end."""
        self.mesh = lay_out(self.mesh.layout, seed=0)

    def load(self, overrides: Sequence[str]) -> LoadedConfig:
        """A configuration that breaks no rule; ``FOLDER`` stands for the folder."""
        texts = [text.replace("FOLDER", str(self.folder)) for text in overrides]
        return require_config(self.folder / "run.yaml", texts)

    @contextmanager
    def run(self, loaded: LoadedConfig) -> Iterator[Run]:
        """A run, ready for its first step."""
        stop = StopRequest(must_save_by_seconds=None)
        with set_up(loaded, read_inputs(loaded.config), self.mesh, stop=stop) as run:
            yield run


def network(shop: Workshop, loaded: LoadedConfig) -> object:
    """megatron-core's TransformerConfig, fusions as a GPU would have them."""
    policy, dppo = loaded.config.policy, loaded.config.dppo
    with patch.object(device, "has_gpu", return_value=True):
        built = transformer_config(
            shop.architecture,
            policy.megatron_cfg,
            precision=policy.precision,
            virtual_pp=dppo.virtual_pipeline_stages,
            rehearse_fp8=dppo.fp8_emulate,
        )
    return {name: repr(value) for name, value in vars(built).items()}


def reduction(shop: Workshop, loaded: LoadedConfig) -> object:
    """megatron-core's DistributedDataParallelConfig, of the model that wraps it."""
    with shop.run(loaded) as run:
        return asdict(run.policy.chunks[0].ddp_config)


def optimizer(shop: Workshop, loaded: LoadedConfig) -> object:
    """megatron-core's optimizer as its own objects have it, and its rates in the next twenty steps."""
    with shop.run(loaded) as run:
        policy, rates = run.policy, []
        settings = {name: repr(value) for name, value in vars(policy.optimizer.config).items()}
        groups = [{name: group[name] for name in ("betas", "eps")} for group in policy.optimizer.param_groups]
        for _ in range(20):
            policy.scheduler.step(increment=1)
            rates.append([(group["lr"], group["weight_decay"]) for group in policy.optimizer.param_groups])
        return settings, groups, rates


def plan(shop: Workshop, loaded: LoadedConfig) -> object:
    """``dppo plan --json``, without what it repeats of the configuration."""
    made = plan_json(make_plan(Examination(loaded, (), ()), path="run.yaml", overrides=()))
    return {name: value for name, value in made.items() if name not in ("config", "files", "warnings")}


def vllm_arguments(shop: Workshop, loaded: LoadedConfig) -> object:
    """The arguments that vLLM's engine gets on a GPU."""
    with patch.object(device, "has_gpu", return_value=True):
        return vllm_engine._options(
            shop.model, architecture=shop.architecture, generation=loaded.config.policy.generation, max_cache_tokens=1
        )


def inputs(shop: Workshop, loaded: LoadedConfig) -> object:
    """What is read before a run: the prompts of both sets, the tokenizer, the model."""
    read = read_inputs(loaded.config)
    sets = [one for one in (read.train, read.validation) if one is not None]
    prompts = [(one.tokens.values.tolist(), one.texts, one.answers) for one in sets]
    return prompts, read.tokenizer.name_or_path, str(read.source), read.architecture, read.stop_token_ids


def loop(shop: Workshop, loaded: LoadedConfig) -> object:
    """What a run would do, read off its parts: how much, on which prompts, when it validates and saves."""
    with shop.run(loaded) as run:
        return {
            "steps": run.num_steps,
            "minibatches": run.num_minibatches,
            "prompts": run.prompts.peek(run.prompts.num_prompts_per_step).prompt_ids.tolist(),
            "epoch": run.prompts.peek(2 * NUM_ROWS).prompt_ids.tolist(),
            "sampling": repr((run.sampling, run.validation_sampling)),
            "resampling": repr(run.resampling),
            "candidates": type(run.candidates).__name__,
            "generator": type(run.generator).__name__,
            "reward": type(run.reward).__name__,
            "reference": run.reference is None,
            "validates": [run.validates_before(0), *(run.validates_after(step) for step in range(run.num_steps))],
            "saves": [run.saves_after(step) for step in range(run.num_steps)],
            "directory": None if run.state is None else run.state.directory,
        }


def loss(shop: Workshop, loaded: LoadedConfig) -> object:
    """The loss of a row of two sequences, its gradient, and what the mini-batch's sum is divided by."""
    size = 8
    values = torch.linspace(-3.0, -0.5, size)
    off = torch.tensor([0.0, 0.9, -0.9, 0.3, 0.4, -0.1, -1.5, 1.2])
    row = PackedRow(
        token_ids=torch.zeros(size, dtype=torch.int64),
        labels=torch.zeros(size, dtype=torch.int64),
        positions=torch.zeros(size, dtype=torch.int64),
        coefficients=torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        advantages=torch.tensor([0.0, 1.0, 1.0, 1.0, -2.0, -2.0, -2.0, -2.0]),
        sampled_logprobs=values + off.flip(0),
        cu_seqlens=torch.tensor([0, 4, 8], dtype=torch.int32),
        sequence_lengths=np.array([4, 4]),
        num_sequences=2,
        old_logprobs=values - off,
        reference_logprobs=values + 25 * off,
    )
    leaf = values.clone().requires_grad_()
    sums = PolicyLoss(loaded.config.loss_fn, sequence_sums=SequenceSums(shop.mesh.cp))(leaf, row)
    sums.loss.backward()
    assert leaf.grad is not None
    return float(sums.loss.detach()), leaf.grad.tolist()


def pruning(shop: Workshop, loaded: LoadedConfig) -> object:
    """Keep probabilities, decisions, weights and denominators on one made-up step, of both levels."""
    config = loaded.config
    rules = Pruning.from_config(config.dppo, loss_fn=config.loss_fn, grpo=config.grpo, max_new_tokens=9)
    section = config.dppo.prompt_pruning
    history = PromptHistory(ema_decay=section.ema_decay, greso=section.greso if section.policy == "greso" else None)
    draws = Draws(config.grpo.seed, 3)
    ids = np.arange(1, 9)
    prompts = PromptBatch(
        prompt_ids=ids,
        occurrences=np.zeros(8, np.int64),
        minibatches=np.zeros(8, np.int64),
        tokens=Ragged.from_rows([[1, 2]] * 8),
        texts=("",) * 8,
        answers=("",) * 8,
        weights=np.ones(8),
        num_candidates=np.array([8]),
    )
    scores = ScoredBatch(
        prompts=prompts,
        num_generations=4,
        rewards=np.repeat([1.0, 0.0, 1.0, 1.0], 8),
        advantages=np.concatenate([np.zeros(4), np.linspace(-2, -1, 4), np.zeros(4), np.linspace(-2, 2, 20) ** 3]),
        completion_lengths=np.arange(2, 34),
        finish_reasons=np.where(np.arange(32) % 5 == 0, FinishReason.LENGTH, FinishReason.STOP),
        surprises=np.linspace(0.5, 4.0, 32) ** 2,
    )
    for scale in (1.0, 0.25, 3.0):
        history.record(replace(scores, advantages=scores.advantages * np.linspace(1, scale, 32)))
    plans = prune_completions(scores, pruning=rules, draws=draws)
    return {
        "notes": rules.notes,
        "prompts": prompt_keep_probabilities(prompts, history=history, pruning=rules, draws=draws).tolist(),
        "kept": prune_prompts(prompts, history=history, pruning=rules, draws=draws).prompt_ids.tolist(),
        "completions": [
            (one.sequences.tolist(), one.weights.tolist(), one.keep_probabilities.tolist(), one.denominator)
            for one in plans
        ],
    }


def rewards(shop: Workshop, loaded: LoadedConfig) -> object:
    """Advantages of two groups of made-up rewards."""
    raw = np.array([0.2, 1.0, 0.0, -0.5, 2.0, 0.7, 0.6, 0.1])
    shaped = shape_rewards(
        raw,
        completion_lengths=np.array([3, 8, 12, 15, 9, 11, 6, 14]),
        finish_reasons=np.where(raw > 0.5, FinishReason.STOP, FinishReason.LENGTH),
        grpo=loaded.config.grpo,
    )
    return shaped.tolist(), group_advantages(shaped.reshape(2, 4), grpo=loaded.config.grpo).tolist()


def rows(shop: Workshop, loaded: LoadedConfig) -> object:
    """Rows that sequences of these lengths are packed into."""
    lengths = np.array([16, 9, 3, 12, 5, 7, 14, 2, 11, 6, 4, 13])
    with shop.run(loaded) as run:
        capacity = loaded.config.policy.sequence_packing.train_mb_tokens
        made = stages._plan(run, lengths, capacity=capacity, dp_size=1)
        return [row.tolist() for row in made.rows[0]], made.sequence_multiple


def step(shop: Workshop, loaded: LoadedConfig) -> object:
    """One step up to its log-probs: rows that pass under the logprob cap, and what an audit finds."""
    with shop.run(loaded) as run:
        run.generator.load_weights(run.policy.hf_weights(), version=0)
        draws = Draws(loaded.config.grpo.seed, 0)
        candidates = run.candidates.next_batch(draws)
        kept = prune_prompts(candidates, history=run.history, pruning=run.pruning, draws=draws)
        rollouts = run.generator.generate(kept, draws, run.sampling)
        scores = stages.score(run, rollouts, kept)
        scores = replace(scores, advantages=np.linspace(-1, 1, len(scores)))
        (chosen,) = prune_completions(scores, pruning=run.pruning, draws=draws)
        batch = stages.pack_rows(run, rollouts, scores, chosen)
        passes = []
        original = run.policy.logprobs

        def count(some_rows: Sequence[PackedRow], *, temperature: float) -> list[torch.Tensor]:
            passes.append(len(some_rows))
            return original(some_rows, temperature=temperature)

        with patch.object(run.policy, "logprobs", count):
            batch = stages.attach_logprobs(run, batch)
        report = stages.audit(run, 0, rollouts, candidates=candidates, scores=scores, batches=[batch], draws=draws)
        return passes, report is None


def weight_stream(shop: Workshop, loaded: LoadedConfig) -> object:
    """Bytes of weights that travel to the engine at once."""
    with shop.run(loaded) as run, patch.object(policy_module.hf_weights, "stream_weights") as stream:
        run.policy.hf_weights()
        return stream.call_args.kwargs["bucket_bytes"]


def checkpoints(shop: Workshop, loaded: LoadedConfig) -> object:
    """What three checkpoints of accuracies 0.5, 0.9 and 0.1 leave behind, and what the newest records."""
    directory = Path(loaded.config.checkpointing.checkpoint_dir)
    with shop.run(loaded) as run:
        for number, accuracy in enumerate((0.5, 0.9, 0.1)):
            pending = stages.save_checkpoint(run, number, accuracy)
            assert pending is not None
            stages.publish_checkpoint(run, pending)
    found = find_checkpoints(directory)
    state = json.loads((found[max(found)] / "run_state.json").read_text())
    return sorted(found), state["metric"], state["with_optimizer"]
