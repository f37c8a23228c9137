"""Convert a megatron-core checkpoint to a Hugging Face model, one tensor at a time, without a process group.

    python tools/convert_megatron_to_hf.py results/grpo/step_100 exported --verify

The source is a run's ``step_N`` or what tools/convert_hf_to_megatron.py made. The target holds the configuration,
tokenizer and chat template that the source carries: transformers and vLLM load it as it is.
"""

import argparse
import sys
from pathlib import Path

from dppo_megatron.conversion import Model, convert_to_hf, verify
from dppo_megatron.parallel.hf_files import SHARD_BYTES
from dppo_megatron.progress_bar import progress_bar


def main() -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="checkpoint directory: config.json beside policy/")
    parser.add_argument("target", type=Path, help="directory to make; it appears when complete")
    parser.add_argument("--verify", action="store_true", help="read the target again and compare every bit")
    parser.add_argument(
        "--shard-mb", type=int, default=SHARD_BYTES // 2**20, help="largest file, MiB (default: %(default)s)"
    )
    options = parser.parse_args()
    try:
        model = Model.open(options.source)
        with progress_bar("convert") as progress:
            convert_to_hf(model, options.target, progress=progress, shard_bytes=options.shard_mb * 2**20)
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
