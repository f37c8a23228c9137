"""Log-probabilities of labels from vocabulary-parallel logits, in chunks."""

from typing import Any

import torch
from torch import Tensor

from dppo_megatron.parallel import collectives
from dppo_megatron.parallel.mesh import Axis


class _LabelLogprobs(torch.autograd.Function):
    """log softmax(logits / temperature)[label] with the vocabulary sharded over the tensor-parallel axis.

    Softmax statistics are float32 and only one chunk of float32 logits exists at a time, forward and backward;
    what is kept for the backward pass is the logits as the model gave them and one float a token.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int, temperature: float, chunk: int
    ) -> Tensor:
        first = tp.rank * logits.size(1)
        num_valid = min(max(vocab_size - first, 0), logits.size(1))
        local = labels - first
        owned = (local >= 0) & (local < num_valid)
        local = local.clamp(0, logits.size(1) - 1)
        logprobs = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
        normalisers = torch.empty_like(logprobs)
        for start in range(0, len(labels), chunk):
            part = slice(start, start + chunk)
            scaled = _scaled(logits[part], num_valid, temperature)
            peak = collectives.max_over(scaled.amax(1), tp)
            at_label = scaled.gather(1, local[part, None]).squeeze(1)
            sums = torch.stack(
                [
                    (scaled - peak[:, None]).exp_().sum(1),
                    torch.where(owned[part], at_label - peak, 0.0),
                ]
            )
            total, shifted = collectives.sum_over(sums, tp)
            log_total = total.log()
            logprobs[part] = shifted - log_total
            normalisers[part] = peak + log_total
        ctx.save_for_backward(logits, local, owned, normalisers)
        ctx.num_valid, ctx.temperature, ctx.chunk = num_valid, temperature, chunk
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, local, owned, normalisers = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for start in range(0, len(local), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            scaled = _scaled(logits[part], ctx.num_valid, ctx.temperature)
            probabilities = (scaled - normalisers[part, None]).exp_()
            slope = grad[part, None] / ctx.temperature
            chunk_grad = probabilities.mul_(-slope)
            chunk_grad.scatter_add_(1, local[part, None], slope * owned[part, None])
            grad_logits[part] = chunk_grad.to(logits.dtype)
        return grad_logits, None, None, None, None, None


def _scaled(logits: Tensor, num_valid: int, temperature: float) -> Tensor:
    # Columns past the vocabulary pad it to a multiple of TP; they have no probability.
    scaled = logits.float() / temperature
    scaled[:, num_valid:] = float("-inf")
    return scaled


def label_logprobs(
    logits: Tensor, labels: Tensor, *, tp: Axis, vocab_size: int, temperature: float, chunk_size: int | None
) -> Tensor:
    """Natural-log probability of each label under softmax(logits / temperature), differentiable.

    logits: [T, padded vocabulary / TP], this rank's columns. labels: int64 [T]. Returns float32 [T], equal on all
    ranks of the tensor-parallel axis. chunk_size: tokens whose float32 logits exist at once; None is all.

    Source: ``megatron.core.tensor_parallel.vocab_parallel_cross_entropy``, which keeps whole float32 rows.
    """
    chunk = chunk_size or max(len(labels), 1)
    return _LabelLogprobs.apply(logits, labels, tp, vocab_size, temperature, chunk)  # type: ignore[no-any-return]
