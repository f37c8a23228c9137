"""Print the table of docs/configuration.md: NeMo-RL's Megatron GRPO files, judged, one line a kind of model.

python tools/nemo_rl_table.py tests/data/nemo_rl/configs
"""

import sys
from collections import Counter
from pathlib import Path

from dppo_megatron.config.loader import Examination, examine

DATA_KEYS = ("data.train.dataset_name", "data.validation.dataset_name", "data.default.dataset_name")


def is_dense(found: Examination) -> bool:
    """Whether a file trains a dense text model on vLLM's rollouts."""
    policy = found.loaded.container["policy"]
    megatron, name = policy["megatron_cfg"], policy["model_name"]
    families = ("Qwen/Qwen2.5", "Qwen/Qwen3-", "meta-llama/Llama", "Qwen/Qwen3.5-9B")
    is_text = name.startswith(families) and not any(sign in name for sign in ("-A", "VL", "Omni"))
    return (
        is_text and megatron.get("expert_model_parallel_size", 1) == 1 and policy["generation"]["backend"] == "vllm"
    )


def main() -> None:
    """Examine every file and count."""
    dense, other = list[Examination](), list[Examination]()
    for file in sorted(Path(sys.argv[1]).rglob("*.yaml")):
        found = examine(file)
        container = found.loaded.container
        if "grpo" in container and (container.get("policy", {}).get("megatron_cfg") or {}).get("enabled"):
            (dense if is_dense(found) else other).append(found)
    for title, group in (("dense, vLLM", dense), ("others", other)):
        keys = [{error.key for error in found.errors} for found in group]
        local = [found for found in keys if not found - set(DATA_KEYS)]
        print(f"## {title}: {len(group)} files")
        print(f"accepted as they stand: {sum(not found for found in keys)}")
        print(f"accepted with the data as JSONL: {len(local)}")
        for key, count in Counter(key for found in keys for key in found).most_common():
            print(f"| `{key}` | {count} |")


if __name__ == "__main__":
    main()
