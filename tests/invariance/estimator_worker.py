"""One rank of a launch that takes whole gradients through the estimator on several layouts.

argv: model directory, output directory, then names of CASES. Each writes the second mini-batch's gradient, taken
after an update on the first, how many collectives the decisions of a step took, and what they counted of failures.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layout_worker import deal_evenly, layout_of
from matrix import LAYOUTS
from safetensors.torch import save_file
from toy_step import TEMPERATURE, ToyStep, gathered_scores, make_step, megatron_config, policy_config, share_of
from transformers import AutoConfig

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import PackedRow, PrunedBatch
from dppo_megatron.config.schema import DppoConfig, GrpoConfig, LossConfig
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.exchange import exchange
from dppo_megatron.parallel.mesh import Mesh, lay_out
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.parallel.sequence_sums import SequenceSums
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.loss import PolicyLoss
from dppo_megatron.rl.prompt_history import PromptHistory
from dppo_megatron.rl.pruning import Pruning, prune_completions, prune_prompts

CLIP = LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=False)
GSPO = replace(CLIP, sequence_level_importance_ratios=True, ratio_clip_min=0.02, ratio_clip_max=0.02)
MASKED = replace(
    CLIP,
    use_importance_sampling_correction=True,
    truncated_importance_sampling_type="seq-mask-tis",
    truncated_importance_sampling_ratio=6.0,
    truncated_importance_sampling_ratio_min=0.1,
)


@dataclass(frozen=True)
class Case:
    """A layout of LAYOUTS and a loss."""

    layout: str
    loss: LossConfig


CASES = {
    "one": Case("one", CLIP),
    "dp2": Case("dp2", CLIP),
    "dp2_sharded": Case("dp2_sharded", CLIP),
    "dp2_sharded_overlap": Case("dp2_sharded_overlap", CLIP),
    "pp2": Case("pp2", CLIP),
    "one_gspo": Case("one", GSPO),
    "cp2_gspo": Case("cp2", GSPO),
    "tp2_sp_gspo": Case("tp2_sp", GSPO),
    "cp2_masked": Case("cp2", MASKED),
}


def minibatches(step: ToyStep) -> tuple[PrunedBatch, PrunedBatch]:
    """The step's survivors in two optimizer steps, uneven: three sequences, then all others."""
    plan, places = step.plan, np.arange(len(step.plan))

    def part(number: int, rows: np.ndarray) -> PrunedBatch:
        return replace(
            plan,
            minibatch=number,
            sequences=plan.sequences[rows],
            weights=plan.weights[rows],
            lengths=plan.lengths[rows],
            completion_lengths=plan.completion_lengths[rows],
            advantages=plan.advantages[rows],
            denominator=plan.denominator / 2,
        )

    return part(0, places[:3]), part(1, places[3:])


def second_gradient(name: str, model: Path) -> dict[str, torch.Tensor]:
    """Update on the first mini-batch, then the gradient of the second, both under the first's old log-probs."""
    case = CASES[name]
    megatron = megatron_config(**LAYOUTS[case.layout][1])
    layout = layout_of(megatron, torch.distributed.get_world_size())
    mesh = lay_out(layout, seed=1)
    architecture = read_architecture(AutoConfig.from_pretrained(model).to_dict())
    policy = Policy(policy_config(model, megatron), architecture, source=model, mesh=mesh)
    step = make_step()
    rows = [packed(step, plan, policy, mesh) for plan in minibatches(step)]
    rows = [policy.attach_logprobs(part, old=True, reference=None, temperature=TEMPERATURE) for part in rows]
    loss = PolicyLoss(case.loss, sequence_sums=SequenceSums(mesh.cp))
    first, second = minibatches(step)
    policy.update(rows[0], loss=loss, denominator=first.denominator, temperature=TEMPERATURE)
    stream = policy.gradients(rows[1], loss=loss, denominator=second.denominator, temperature=TEMPERATURE)
    result = {key: tensor.clone() for key, tensor in stream}
    result["decisions"] = torch.tensor(decision_counts(step, mesh))
    return result


def packed(step: ToyStep, plan: PrunedBatch, policy: Policy, mesh: Mesh) -> list[PackedRow]:
    return exchange(
        share_of(step, rank=mesh.world.rank, size=mesh.world.size),
        plan,
        deal_evenly(len(plan), mesh.layout),
        scores=step.scores,
        token_level_loss=False,
        mesh=mesh,
    )


def decision_counts(step: ToyStep, mesh: Mesh) -> tuple[int, int, int]:
    """Of one step's scores, keep decisions and their check: all-gathers, all-reduces, failed rewards."""
    pruning = Pruning.from_config(DppoConfig(), loss_fn=CLIP, grpo=GrpoConfig(), max_new_tokens=11)
    history = PromptHistory(ema_decay=0.9)
    history.record(step.scores)
    with counted() as calls:
        prune_prompts(step.scores.prompts, history=history, pruning=pruning, draws=Draws(0, 0))
        scores = gathered_scores(step, mesh)
        history.record(scores)
        prune_completions(scores, pruning=pruning, draws=Draws(0, 0))
        collectives.require_equal(7, mesh.world, what="keep decisions")
    assert set(calls) <= {"all_gather_into_tensor", "all_reduce"}, calls
    return calls["all_gather_into_tensor"], calls["all_reduce"], scores.num_failures


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the calls of every collective of torch.distributed."""
    calls: Counter[str] = Counter()
    names = ("all_reduce", "all_gather_into_tensor", "all_gather", "all_gather_object", "broadcast", "barrier")
    names = (
        *names,
        "all_to_all_single",
        "reduce_scatter_tensor",
        "broadcast_object_list",
        "gather",
        "scatter",
        "reduce",
    )
    originals = {name: getattr(torch.distributed, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(torch.distributed, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(torch.distributed, name, original)


def main() -> None:
    """Run the cases named on the command line."""
    model, output = Path(sys.argv[1]), Path(sys.argv[2])
    device.set_num_threads()
    device.start_process_group()
    for name in sys.argv[3:]:
        result = second_gradient(name, model)
        if torch.distributed.get_rank() == 0:
            save_file(result, output / f"{name}.safetensors")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
