"""One rank of a launch that holds several runs: argv is JSON, [[configuration file, override, ...], ...]."""

import json
import sys

import torch

from dppo_megatron import device
from dppo_megatron.config.loader import load_config
from dppo_megatron.config.rules import check_config
from dppo_megatron.plan import resolve_layout
from dppo_megatron.train import run_training


def main() -> None:
    """Run them in turn."""
    device.set_num_threads()
    device.start_process_group()
    for path, *overrides in json.loads(sys.argv[1]):
        loaded = load_config(path, overrides)
        check_config(loaded.config)
        config = loaded.config
        layout = resolve_layout(
            config.cluster,
            megatron=config.policy.megatron_cfg,
            virtual_pp=config.dppo.virtual_pipeline_stages,
        )
        run_training(loaded, layout, command=["test"])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
