"""megatron-core's optimizer and its schedule of learning rate and weight decay."""

import logging

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from dppo_megatron import device
from dppo_megatron.config import schema

logger = logging.getLogger(__name__)


def data_parallel_config(megatron: schema.MegatronConfig) -> DistributedDataParallelConfig:
    """How gradients are reduced: summed (the loss divides), overlapped with the backward pass where asked for.

    Parameters are gathered at once after a step, never lazily in the next forward pass (megatron-core's
    ``overlap_param_gather``): rollouts, reference and mini-batches read them before that.
    """
    settings = megatron.distributed_data_parallel_config
    sharded = megatron.optimizer.use_distributed_optimizer
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.grad_reduce_in_fp32,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=False,
        use_distributed_optimizer=sharded,
        check_for_nan_in_grad=False,  # it would end the run: the policy looks itself, and skips the step
    )


def build_optimizer(
    chunks: list[DistributedDataParallel], config: TransformerConfig, *, megatron: schema.MegatronConfig
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Adam over this rank's share of the parameters, and the scheduler that sets its rates before each step."""
    settings, schedule = megatron.optimizer, megatron.scheduler
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=config.params_dtype is torch.bfloat16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=settings.use_distributed_optimizer,
        ),
        list(chunks),
    )
    device.give_adam_its_state(optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters,
        lr_decay_steps=schedule.lr_decay_iters or schedule.lr_warmup_iters + 1,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=schedule.start_weight_decay,
        end_wd=schedule.end_weight_decay,
        wd_incr_steps=max(schedule.lr_decay_iters or 0, 1),
        wd_incr_style=schedule.weight_decay_incr_style,
    )
    return optimizer, scheduler
