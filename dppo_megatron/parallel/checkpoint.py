"""The policy's checkpoint in megatron-core's layout-free torch_dist format: model and optimizer."""

import queue
from pathlib import Path
from typing import Any

import psutil  # noqa: F401  (megatron-core's writer does not declare it, and hangs for ever without it)
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from dppo_megatron import device
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.policy import Policy

# Saving is synchronous: each rank reads the results that it has put itself. Megatron's default for this queue is a
# manager's, a process that imports torch at the first save and outlives a rank that is killed.
filesystem_async._results_queue = queue.Queue()


def save_policy(policy: Policy, directory: Path, *, with_optimizer: bool) -> None:
    """Write the shards of every rank into an existing, empty directory; called by every rank.

    Raises OSError on every rank where one of them could not write its shards.
    """
    with device.megatron_calls():
        state = _sharded_state(policy, with_optimizer=with_optimizer, is_loading=False)
        try:
            dist_checkpointing.save(state, str(directory))
        except CheckpointException as error:
            # It is no Exception, and only the first rank knows why.
            reasons = {str(cause) for cause, _ in error.failures.values()} or {"another rank could not write"}
            raise OSError("; ".join(sorted(reasons))) from error
    collectives.barrier(policy.mesh.world)


def load_policy(policy: Policy, directory: Path) -> None:
    """Restore model and optimizer from any layout; called by every rank.

    Raises ValueError where it holds another kind of optimizer state, none, or a model of other sizes.
    """
    with device.megatron_calls():
        state = _sharded_state(policy, with_optimizer=True, is_loading=True)
        try:
            loaded: Any = dist_checkpointing.load(state, str(directory), strict=StrictHandling.RAISE_ALL)
        except CheckpointingException as error:
            raise ValueError(
                f"{directory} holds another model or optimizer than this configuration ({error!s:.200}...); set back "
                "policy.megatron_cfg.optimizer.use_distributed_optimizer or the model, or start a new run from its "
                "weights: policy.model_name, with another logger.log_dir and checkpoint_dir"
            ) from error
        for number, network in enumerate(policy.networks):
            network.load_state_dict(loaded["model"][str(number)])
        device.restore_first_steps(loaded["optimizer"])
        policy.optimizer.load_state_dict(loaded["optimizer"])
        device.separate_adam_steps(policy.optimizer)


def _sharded_state(policy: Policy, *, with_optimizer: bool, is_loading: bool) -> dict[str, Any]:
    metadata = {
        # The format that any data-parallel size can load.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": policy.mesh.dp_cp.group,
    }
    networks: list[Any] = list(policy.networks)
    model = {str(number): one.sharded_state_dict(metadata=metadata) for number, one in enumerate(networks)}
    state: dict[str, Any] = {"model": model}
    if with_optimizer:
        state["optimizer"] = policy.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return state
