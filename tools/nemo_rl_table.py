"""Print the table of docs/configuration.md: NeMo-RL's GRPO files, judged as ``dppo config check`` judges them.

HF_HOME=/hf_home HF_DATASETS_CACHE=/hf_datasets python tools/nemo_rl_table.py tests/data/nemo_rl/configs
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.config.loader import Examination
from dppo_megatron.run_plan import examine_run


@dataclass(frozen=True, slots=True)
class Group:
    """Files of one kind, by path below the folder."""

    title: str
    found: dict[str, Examination]


def lacks_base(found: Examination) -> bool:
    """Whether a file stands on one that is not there, so that nothing more can be said of it."""
    return any(error.key == "defaults" for error in found.errors)


def is_megatron(container: dict[str, Any]) -> bool:
    """Whether a file trains by Megatron."""
    return bool((container.get("policy", {}).get("megatron_cfg") or {}).get("enabled"))


def is_dense(container: dict[str, Any]) -> bool:
    """Whether a file trains one dense model on vLLM's rollouts, and no more: no second controller, no data plane,
    no draft model, no quantised training."""
    policy = container["policy"]
    switches = (container.get("data_plane"), policy.get("draft"))
    return (
        policy["megatron_cfg"].get("expert_model_parallel_size", 1) == 1
        and policy["generation"]["backend"] == "vllm"
        and not any((switch or {}).get("enabled") for switch in switches)
        and not policy.get("quant_cfg")
        and "async_rl" not in container
    )


def grpo_files(folder: Path) -> tuple[Group, ...]:
    """NeMo-RL's GRPO files, those whose names begin with grpo, in groups that share none."""
    files = sorted(file for file in folder.rglob("*.yaml") if file.name.startswith("grpo"))
    found = {str(file.relative_to(folder)): examine_run(str(file), ()) for file in files}
    whole = {name: one for name, one in found.items() if not lacks_base(one)}
    megatron = {name: one for name, one in whole.items() if is_megatron(one.loaded.container)}
    dense = {name: one for name, one in megatron.items() if is_dense(one.loaded.container)}
    return (
        Group("dense on vLLM", dense),
        Group("other Megatron files", {name: one for name, one in megatron.items() if name not in dense}),
        Group("without Megatron", {name: one for name, one in whole.items() if name not in megatron}),
        Group("whose base file is not there", {name: one for name, one in found.items() if name not in whole}),
    )


def print_group(group: Group) -> None:
    """How many are accepted, and what the others are refused for."""
    keys = [{error.key for error in one.errors} for one in group.found.values()]
    sys.stdout.write(f"## {group.title}: {len(keys)}, accepted as they stand: {sum(not found for found in keys)}\n")
    for key, count in Counter(key for found in keys for key in found).most_common():
        sys.stdout.write(f"| `{key}` | {count} |\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Examine every file and count."""
    (folder,) = sys.argv[1:] if arguments is None else arguments
    groups = grpo_files(Path(folder))
    sys.stdout.write(f"{sum(len(group.found) for group in groups)} files\n")
    for group in groups:
        print_group(group)


if __name__ == "__main__":
    main()
