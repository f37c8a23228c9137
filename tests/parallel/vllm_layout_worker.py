"""One rank of a launch that trains on several layouts and samples with vLLM from what it trained.

argv: the directories of models. Exits with an error where a greedy completion is not Hugging Face's.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from toy_step import DENOMINATOR, TEMPERATURE, make_step, megatron_config, policy_config, share_of
from transformers import AutoConfig, Qwen3ForCausalLM

from dppo_megatron import device
from dppo_megatron.architecture import Architecture, read_architecture
from dppo_megatron.batches import PromptBatch, RowPlan, Sampling
from dppo_megatron.config.generation_schema import GenerationConfig, VllmConfig
from dppo_megatron.config.schema import LossConfig
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.exchange import exchange
from dppo_megatron.parallel.hf_names import streamed_names
from dppo_megatron.parallel.mesh import lay_out, split_axis
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.parallel.resharding import engine_slabs
from dppo_megatron.plan import Layout
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.loss import PolicyLoss
from dppo_megatron.rl.vllm_engine import VllmEngine
from dppo_megatron.rl.vllm_generator import VllmGenerator

NUM_UPDATES, MAX_LENGTH = 5, 64
LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "dp2": (1, 1)}  # TP and PP of two processes
GREEDY = Sampling(num_generations=1, temperature=0.0, max_new_tokens=8, stop_token_ids=(60,))


def layout_of(name: str) -> Layout:
    """The trainer's layout on all processes."""
    tp, pp = LAYOUTS[name]
    dp = torch.distributed.get_world_size() // (tp * pp)
    return Layout(tp=tp, pp=pp, cp=1, dp=dp, sequence_parallel=False)


def deal_rows(num_sequences: int, layout: Layout) -> RowPlan:
    """Two rows a data-parallel rank, sequences dealt in turn."""
    bins = [np.arange(start, num_sequences, 2 * layout.dp) for start in range(2 * layout.dp)]
    rows = tuple(tuple(bins[2 * rank : 2 * rank + 2]) for rank in range(layout.dp))
    return RowPlan(rows=rows, sequence_multiple=1, row_multiple=1, num_packed=len(bins))


def start_engine(model: Path, architecture: Architecture, *, tp: int) -> VllmGenerator:
    """An engine of ``tp`` ranks a part, over the whole world."""
    mesh = lay_out(layout_of("dp2"), seed=0)
    ranks = split_axis(mesh.world, tp, name="engine")
    vllm_cfg = VllmConfig(precision="float32", max_model_len=MAX_LENGTH, tensor_parallel_size=tp)
    return VllmGenerator(
        VllmEngine(
            model,
            architecture=architecture,
            generation=GenerationConfig(max_new_tokens=8, vllm_cfg=vllm_cfg),
            max_cache_tokens=8192,
        ),
        weight_names=streamed_names(architecture),
        max_model_len=MAX_LENGTH,
        time_limit_seconds=300.0,
        pool=partial(collectives.gather_objects, axis=ranks),
        engine_rank=ranks.rank,
        tensor_parallel_size=ranks.size,
    )


def train_and_sample(name: str, model: Path, architecture: Architecture, generator: VllmGenerator) -> None:
    """Five updates on one trainer layout; after each, greedy completions against Hugging Face's."""
    layout = layout_of(name)
    mesh = lay_out(layout, seed=1)
    megatron = megatron_config(tp=layout.tp, pp=layout.pp)
    policy = Policy(policy_config(model, megatron), architecture, source=model, mesh=mesh)
    step, loss = make_step(), PolicyLoss(LossConfig(reference_policy_kl_penalty=0.0))
    rows = exchange(
        share_of(step, rank=mesh.world.rank, size=mesh.world.size),
        step.plan,
        deal_rows(len(step.plan), layout),
        scores=step.scores,
        token_level_loss=False,
        mesh=mesh,
    )
    # Five prompts: the ranks of an engine get unequal shares.
    prompts = step.scores.prompts.take(np.arange(5))
    share = prompts.share(rank=mesh.world.rank, size=mesh.world.size)
    seen = []
    for version in range(NUM_UPDATES):
        policy.update(rows, loss=loss, denominator=DENOMINATOR, temperature=TEMPERATURE)
        weights = policy.hf_weights(engine_tp=generator.tensor_parallel_size)
        weights = without_the_parts_of_others(weights, architecture, engine_tp=generator.tensor_parallel_size)
        generator.load_weights(weights, version=version)
        rollouts = generator.generate(share, Draws(0, version), GREEDY)
        assert rollouts.version == version
        sampled = [rollouts.completions[row].tolist() for row in range(len(share))]
        expected = greedy(policy, model, share)
        assert sampled == expected, f"{name}, update {version}: {sampled} is not {expected}"
        seen.append(sampled)
    assert seen[0] != seen[-1], "five updates change what is likeliest, else nothing is shown"


def without_the_parts_of_others(
    weights: Iterator[tuple[str, Tensor]], architecture: Architecture, *, engine_tp: int
) -> Iterator[tuple[str, Tensor]]:
    """The stream with NaN where this rank of an engine should not look."""
    rank = torch.distributed.get_rank() % engine_tp
    parts = {slab.hf_name: slab for slab in engine_slabs(architecture, tp=engine_tp, rank=rank)}
    parts.setdefault("lm_head.weight", parts["model.embed_tokens.weight"])
    for name, tensor in weights:
        part, spoilt = parts[name], torch.full_like(tensor, torch.nan)
        interval = (part.dim, part.start, part.stop - part.start)
        spoilt.narrow(*interval).copy_(tensor.narrow(*interval))
        yield name, spoilt


@torch.no_grad()
def greedy(policy: Policy, source: Path, prompts: PromptBatch) -> list[list[int]]:
    """Greedy completions of the trained weights by Hugging Face, by whole forward passes."""
    config: Any = AutoConfig.from_pretrained(source)
    model = Qwen3ForCausalLM(config).float().eval()
    model.load_state_dict({name: tensor.clone() for name, tensor in policy.hf_weights()})
    completions = []
    for row in range(len(prompts)):
        ids, start = prompts.tokens[row].tolist(), len(prompts.tokens[row])
        while len(ids) - start < GREEDY.max_new_tokens and (len(ids) == start or ids[-1] != 60):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        completions.append(ids[start:])
    return completions


def main() -> None:
    """Every model, engine size and trainer layout in turn."""
    device.set_num_threads()
    device.start_process_group()
    for model in map(Path, sys.argv[1:]):
        architecture = read_architecture(AutoConfig.from_pretrained(model).to_dict())
        for tp in (1, 2):
            generator = start_engine(model, architecture, tp=tp)
            for name in LAYOUTS:
                train_and_sample(name, model, architecture, generator)
            generator.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
