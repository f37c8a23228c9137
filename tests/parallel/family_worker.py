"""One rank of a launch that loads models on several layouts, writes their logits and exports them again.

argv: output directory, then ``layout=model directory`` pairs. One of them goes through megatron-core's own
checkpoints too, which take half a minute.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from family_models import LENGTHS, token_ids
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from safetensors.torch import save_file
from toy_step import megatron_config, policy_config

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.batches import PackedRow
from dppo_megatron.model_source import copy_companions, read_model_config
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.checkpoint import _sharded_state, save_policy
from dppo_megatron.parallel.hf_export import save_hf
from dppo_megatron.parallel.mesh import Mesh, lay_out
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.plan import Layout

CHECKPOINT = "qwen2_tied-torch_dist-tp2pp2"
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2pp2": (2, 2)}


def packed_row() -> PackedRow:
    """The sequences as one row; only ids and positions matter for logits."""
    ids = token_ids()
    nothing = torch.zeros(len(ids))
    lengths = np.array(LENGTHS)
    bounds = torch.tensor([0, *lengths.cumsum()], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return PackedRow(ids, ids, positions, nothing, nothing, nothing, bounds, lengths, num_sequences=len(LENGTHS))


def logits_of(policy: Policy, mesh: Mesh) -> torch.Tensor | None:
    """Logits [T, vocabulary] on the last stage's ranks, elsewhere None."""

    def keep(row: PackedRow, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return logits.new_zeros(()), logits.new_zeros((), dtype=torch.int), logits[0].detach()

    with torch.no_grad():
        kept = policy._run([packed_row()], keep, forward_only=True)
    if not kept:
        return None
    shards = [torch.empty_like(kept[0]) for _ in range(mesh.tp.size)]
    torch.distributed.all_gather(shards, kept[0].contiguous(), group=mesh.tp.group)
    return torch.cat(shards, 1)[:, : policy.architecture.vocab_size].contiguous()


def save_checkpoint(policy: Policy, directory: Path) -> None:
    """Write what a run's ``step_N`` holds of a model."""
    if policy.mesh.world.is_first:
        (directory / "policy").mkdir(parents=True)
        copy_companions(policy.source, directory)
    collectives.barrier(policy.mesh.world)
    save_policy(policy, directory / "policy", with_optimizer=False)


def load_by_megatron(policy: Policy, directory: Path) -> None:
    """Compare the policy's weights with what megatron-core, as strict as it can be, reads from a directory."""
    with device.megatron_calls():
        state = _sharded_state(policy, with_optimizer=False, is_loading=True)
        loaded: Any = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RAISE_ALL)
    weights = policy.networks[0].state_dict()
    for name, tensor in loaded["model"]["0"].items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, weights[name]), name


def main() -> None:
    """Run the pairs named on the command line."""
    output, world_size = Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
    device.set_num_threads()
    device.start_process_group()
    mesh: Mesh | None = None
    for pair in sys.argv[2:]:
        name, model = pair.split("=", 1)
        tp, pp = LAYOUTS[name]
        layout = Layout(tp=tp, pp=pp, cp=1, dp=world_size // (tp * pp), sequence_parallel=False)
        if mesh is None or mesh.layout != layout:
            mesh = lay_out(layout, seed=1)
        source = Path(model)
        architecture = read_architecture(read_model_config(source))
        config = policy_config(source, megatron_config(tp=tp, pp=pp))
        policy = Policy(config, architecture, source=source, mesh=mesh)
        logits = logits_of(policy, mesh)
        key = f"{source.name}-{name}"
        if logits is not None and mesh.dp.is_first and mesh.tp.is_first:
            save_file({"logits": logits}, output / f"{key}.safetensors")
        save_hf(policy, output / key)
        if key == CHECKPOINT:
            load_by_megatron(policy, source / "policy")
            save_checkpoint(policy, output / "checkpoint")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
