"""FP8 training rehearsed without FP8 hardware: megatron-core's own linears, their operands quantised and dequantised.

Three products of a linear have FP8 operands, each quantised from its values in full: output = input x weight,
the input's gradient = output's gradient x weight, the weight's gradient = output's gradient x input. Products are
summed in float32. What a rank multiplies is what is quantised, sequence parallelism's gathered tokens included, so
per-tensor scales and the layout's axes agree as they do under Transformer Engine.

Departures, all of delayed scaling: weights are quantised anew for each micro-batch, not once a step, and scales are
not in checkpoints (they start from 1 again).
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron.config.fp8 import Fp8Config
from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.fp8_scaling import (
    E4M3,
    E5M2,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Quantizer,
    e8m0_scale,
    power_of_two_scale,
)
from dppo_megatron.parallel.mesh import Axis

_BLOCK, _MX_BLOCK = 128, 32


@dataclass(frozen=True)
class Operands:
    """The quantizers of one linear's inputs, weight and output gradients."""

    inputs: Quantizer
    weight: Quantizer
    gradients: Quantizer


@dataclass
class Fp8Rehearsal:
    """The recipe of one pipeline stage's linears, and the delayed scales that they share the update of.

    amax_axis: the ranks over which delayed scaling takes the largest magnitudes: those of the stage.
    """

    fp8: Fp8Config
    config: TransformerConfig
    amax_axis: Axis
    operands: list[Operands] = field(default_factory=list)

    def is_in_fp8(self, layer: int) -> bool:
        """Whether a layer, by its index in the whole model, runs in FP8."""
        fp8 = self.fp8
        first, last = fp8.num_layers_at_start_in_bf16, self.config.num_layers - fp8.num_layers_at_end_in_bf16
        return not fp8.first_last_layers_bf16 or first <= layer < last

    def add_linear(self) -> int:
        """Make the quantizers of one more linear, in the order of the forward pass; its index among them."""
        backward = E5M2 if self.fp8.fp8 == "hybrid" else E4M3
        weight = self._quantizer(E4M3, is_weight=True)
        self.operands.append(Operands(self._quantizer(E4M3), weight, self._quantizer(backward)))
        return len(self.operands) - 1

    def _quantizer(self, kind: torch.dtype, *, is_weight: bool = False) -> Quantizer:
        match self.fp8.fp8_recipe:
            case "tensorwise":
                return CurrentScaling(kind)
            case "blockwise":
                return BlockScaling(kind, _BLOCK, square=is_weight, scale_of=power_of_two_scale)
            case "mxfp8":
                return BlockScaling(kind, _MX_BLOCK, square=False, scale_of=e8m0_scale)
            case "delayed":
                return DelayedScaling(
                    kind,
                    margin=self.config.fp8_margin,
                    history_length=self.config.fp8_amax_history_len,
                    most_recent=self.config.fp8_amax_compute_algo == "most_recent",
                )

    def end_forward(self) -> None:
        """Choose the scales of inputs and weights anew; called by every rank of ``amax_axis`` after a pass."""
        self._update([one for made in self.operands for one in (made.inputs, made.weight)])

    def end_backward(self) -> None:
        """Choose the scales of gradients anew; called by every rank of ``amax_axis`` after a backward pass."""
        self._update([made.gradients for made in self.operands])

    def _update(self, quantizers: list[Quantizer]) -> None:
        seen = {one: amax for one in quantizers if isinstance(one, DelayedScaling) and (amax := one.seen) is not None}
        if seen:
            amaxes = collectives.max_over(torch.stack(tuple(seen.values())), self.amax_axis)
            for one, amax in zip(seen, amaxes, strict=True):
                one.update(amax)


class _QuantizedProduct(torch.autograd.Function):
    """inputs [T, in] x weight [out, in] -> [T, out], all three products of quantised operands."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, operands: Operands, ends_backward: Any) -> Tensor:
        ctx.operands, ctx.ends_backward, ctx.dtypes = operands, ends_backward, (inputs.dtype, weight.dtype)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(operands.inputs(inputs, contracted=0), operands.weight(weight, contracted=0))
        product = operands.inputs(inputs, contracted=1) @ operands.weight(weight, contracted=1).t()
        return product.to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, weight = ctx.saved_tensors
        quantize = ctx.operands.gradients
        of_inputs = quantize(gradient, contracted=1) @ weight
        of_weight = quantize(gradient, contracted=0).t() @ inputs
        if ctx.ends_backward is not None:
            ctx.ends_backward()
        return of_inputs.to(ctx.dtypes[0]), of_weight.to(ctx.dtypes[1]), None, None


def _product(inputs: Tensor, weight: Tensor, *, bias: Tensor | None, rehearsal: Fp8Rehearsal, index: int) -> Tensor:
    operands = rehearsal.operands[index]
    # A stage's first linear is the last of its backward pass.
    product = _QuantizedProduct.apply(
        inputs.flatten(0, -2), weight, operands, rehearsal.end_backward if index == 0 else None
    )
    assert isinstance(product, Tensor)
    if index == len(rehearsal.operands) - 1 and torch.is_grad_enabled():
        rehearsal.end_forward()
    product = product.unflatten(0, inputs.shape[:-1])
    return product if bias is None else product + bias


def rehearse(chunk: Any, rehearsal: Fp8Rehearsal) -> None:
    """Let the linears of a stage's layers multiply in rehearsed FP8; embedding and output layer stay as they are."""
    for layer in chunk.decoder.layers:
        if not rehearsal.is_in_fp8(layer.layer_number - 1):
            continue
        attention, feed_forward = layer.self_attention, layer.mlp
        for linear in (
            attention.linear_qkv,
            attention.linear_proj,
            feed_forward.linear_fc1,
            feed_forward.linear_fc2,
        ):
            # The one place where megatron-core's linears multiply; what is around it, they do.
            assert callable(linear._forward_impl)
            linear._forward_impl = partial(_forward, rehearsal=rehearsal, index=rehearsal.add_linear())


def _forward(
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    rehearsal: Fp8Rehearsal,
    index: int,
    **_: Any,
) -> Tensor:
    inputs = input
    if sequence_parallel:
        inputs = gather_from_sequence_parallel_region(inputs, group=tp_group)
    elif allreduce_dgrad:
        inputs = copy_to_tensor_model_parallel_region(inputs, group=tp_group)
    return _product(inputs, weight, bias=bias, rehearsal=rehearsal, index=index)
