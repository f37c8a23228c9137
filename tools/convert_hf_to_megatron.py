"""Convert a Hugging Face model to a megatron-core checkpoint, one tensor at a time, without a process group.

    python tools/convert_hf_to_megatron.py Qwen/Qwen3-8B checkpoints/qwen3-8b
    python tools/convert_hf_to_megatron.py models/mine out --tp 2 --pp 4 --virtual-pp 2 --verify

The target is layout-free (torch_dist) unless a layout is given; ``policy.model_name`` takes either. Stopped and
started again with the same arguments it continues.
"""

import argparse
import sys
from pathlib import Path

from dppo_megatron.conversion import Model, convert_to_megatron, verify
from dppo_megatron.model_source import find_model
from dppo_megatron.parallel.sharded_files import TargetLayout
from dppo_megatron.progress_bar import progress_bar


def main() -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="local directory, or hub name with or without @revision")
    parser.add_argument("target", type=Path, help="directory to make; it appears when complete")
    parser.add_argument("--tp", type=int, help="tensor parallelism of a sharded target")
    parser.add_argument("--pp", type=int, help="pipeline parallelism of a sharded target")
    parser.add_argument("--virtual-pp", type=int, help="chunks a pipeline stage of a sharded target")
    parser.add_argument("--verify", action="store_true", help="read the target again and compare every bit")
    parser.add_argument("--allow-pickle", action="store_true", help="read .bin files (tensors only, no code)")
    options = parser.parse_args()
    sizes = (options.tp, options.pp, options.virtual_pp)
    layout = None if sizes == (None, None, None) else TargetLayout(*(size or 1 for size in sizes))
    try:
        model = Model.open(find_model(options.source), allow_pickle=options.allow_pickle)
        with progress_bar("convert") as progress:
            convert_to_megatron(model, options.target, layout=layout, progress=progress)
        if options.verify:
            with progress_bar("verify") as progress:
                verify(model, options.target, progress=progress)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print(options.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
