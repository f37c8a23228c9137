"""What megatron-core's optimizer holds of each parameter, whole on every data-parallel rank."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.hf_weights import stream_weights
from dppo_megatron.parallel.policy import Policy

KINDS = ("gradients", "first", "second", "main")
"""The gradient after clipping, Adam's two moments, and the float32 parameter that Adam moves."""


def streamed_state(policy: Policy, kind: str) -> Iterator[tuple[str, Tensor]]:
    """One kind under Hugging Face names, through the stream that the weights take; called by every rank."""
    # The tied copy on a last stage has a state of its own that must be equal: it is not in the table.
    by_storage = {parameter.data_ptr(): parameter for parameter in policy.own_parameters()}
    values = {
        name: _whole(policy, by_storage[shard.data_ptr()], kind) for name, shard in policy.parameters.local.items()
    }
    return stream_weights(replace(policy.parameters, local=values), mesh=policy.mesh, bucket_bytes=2**20)


def _whole(policy: Policy, parameter: Any, kind: str) -> Tensor:
    if not policy.config.megatron_cfg.optimizer.use_distributed_optimizer:
        return _plain(policy, parameter, kind)
    for part in _parts(policy.optimizer):
        for ranges in part.gbuf_ranges:
            for buckets in ranges.values():
                for bucket in buckets:
                    if parameter in bucket["param_map"]:
                        return _gathered(policy, part, parameter, bucket["param_map"][parameter]["param"], kind)
    # Another rank's shard holds all of it.
    return collectives.sum_over(torch.zeros(parameter.shape), policy.mesh.dp_cp)


def _gathered(policy: Policy, part: Any, parameter: Any, place: Any, kind: str) -> Tensor:
    values = torch.zeros(parameter.numel())
    held = part._get_main_param_and_optimizer_states(parameter)
    if kind == "gradients":
        shard = parameter.main_grad.flatten()[place.start : place.end]
    else:
        shard = held[{"first": "exp_avg", "second": "exp_avg_sq", "main": "param"}[kind]]
    values[place.start : place.end] = shard.detach()
    return collectives.sum_over(values, policy.mesh.dp_cp).view(parameter.shape)


def _plain(policy: Policy, parameter: Any, kind: str) -> Tensor:
    if kind == "gradients":
        return parameter.main_grad
    main = getattr(parameter, "main_param", parameter)
    if kind == "main":
        return main.detach()
    for part in _parts(policy.optimizer):
        if main in part.optimizer.state:
            return part.optimizer.state[main]["exp_avg" if kind == "first" else "exp_avg_sq"]
    raise AssertionError("a parameter that no optimizer holds")


def _parts(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])
