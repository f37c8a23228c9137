"""Take the toy step, save and load it, and write which CUDA calls of megatron-core ran on the CPU instead.

argv: model directory, output file.
"""

import json
import sys
from pathlib import Path

import torch
from layout_worker import layout_of, take_steps
from matrix import PARITY
from suite import step_of
from toy_step import policy_config
from transformers import AutoConfig

from dppo_megatron import device
from dppo_megatron.architecture import read_architecture
from dppo_megatron.parallel.checkpoint import load_policy, save_policy
from dppo_megatron.parallel.mesh import lay_out
from dppo_megatron.parallel.policy import Policy


def main() -> None:
    """Run on one process, with the sharded optimizer."""
    model, output = Path(sys.argv[1]), Path(sys.argv[2])
    device.set_num_threads()
    device.start_process_group()
    device.trace_sites = True
    megatron = PARITY["tied-dp2_sharded"].megatron
    layout = layout_of(megatron, 1)
    mesh = lay_out(layout, seed=1)
    architecture = read_architecture(AutoConfig.from_pretrained(model).to_dict())
    policy = Policy(policy_config(model, megatron), architecture, source=model, mesh=mesh)
    take_steps(policy, mesh, layout, step_of("float32"), "evenly")
    checkpoint = output.with_suffix(".checkpoint")
    checkpoint.mkdir()
    save_policy(policy, checkpoint, with_optimizer=True)
    load_policy(policy, checkpoint)
    output.write_text(json.dumps(sorted(device.sites)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
