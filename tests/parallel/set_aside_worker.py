"""Takes two updates of the toy step, in bfloat16, with and without a pause between them. argv: model, output file."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fp8_worker import rows_of
from toy_step import TEMPERATURE, megatron_config, policy_config
from transformers import AutoConfig

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.config.schema import LossConfig
from dppo_megatron.parallel.mesh import lay_out
from dppo_megatron.parallel.policy import Policy
from dppo_megatron.parallel.set_aside import training_state_set_aside
from dppo_megatron.plan import Layout
from dppo_megatron.rl.loss import PolicyLoss


def run(model: Path, *, pauses: bool, sharded: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Weights after both updates; bytes of gradient buffers before, in and after the pause."""
    mesh = lay_out(Layout(tp=1, pp=1, cp=1, dp=1, sequence_parallel=False), seed=1)
    megatron = megatron_config(bfloat16=True, sharded=sharded)
    config = replace(policy_config(model, megatron), precision="bfloat16")
    architecture = read_architecture(AutoConfig.from_pretrained(model).to_dict())
    policy = Policy(config, architecture, source=model, mesh=mesh)
    rows, loss, held = rows_of(mesh), PolicyLoss(LossConfig(reference_policy_kl_penalty=0.0)), []

    def gradient_bytes() -> int:
        chunks: list[Any] = policy.chunks
        return sum(buffer.grad_data.untyped_storage().nbytes() for chunk in chunks for buffer in chunk.buffers)

    for update in range(2):
        policy.update(rows, loss=loss, denominator=24.0, temperature=TEMPERATURE)
        if pauses and update == 0:
            held.append(gradient_bytes())
            with training_state_set_aside(policy.chunks, policy.optimizer):
                held.append(gradient_bytes())
                during = {name: tensor.clone() for name, tensor in policy.hf_weights()}
            held.append(gradient_bytes())
            after = dict(policy.hf_weights())
            assert all(torch.equal(tensor, after[name]) for name, tensor in during.items())
    return {name: tensor.clone() for name, tensor in policy.hf_weights()}, held


def main() -> None:
    """Compare and write what was found."""
    device.set_num_threads()
    device.start_process_group()
    found = {}
    for sharded in (False, True):
        paused, held = run(Path(sys.argv[1]), pauses=True, sharded=sharded)
        whole, _ = run(Path(sys.argv[1]), pauses=False, sharded=sharded)
        same = all(torch.equal(tensor, whole[name]) for name, tensor in paused.items())
        found[f"sharded {sharded}"] = {"same": same, "bytes": held}
    Path(sys.argv[2]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
