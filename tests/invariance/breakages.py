"""Protections taken away, one at a time: each is a bug that a trainer has had in silence."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from dppo_megatron.batches import PackedRow
from dppo_megatron.parallel import exchange, policy
from dppo_megatron.parallel.layer_spec import RmsNorm
from dppo_megatron.parallel.policy import Policy


@contextmanager
def _sequence_parallel_mark() -> Iterator[None]:
    """Norm weights whose partial gradients nobody sums."""
    whole = RmsNorm.__init__

    def unmarked(self: Any, *arguments: Any, **named: Any) -> None:
        whole(self, *arguments, **named)
        self.weight.sequence_parallel = False

    with patch.object(RmsNorm, "__init__", unmarked):
        yield


@contextmanager
def _label_shift() -> Iterator[None]:
    """Labels taken from the next token that the rank holds, not from the next of the sequence."""
    whole = exchange.lay_out_row

    def shifted(*arguments: Any, **named: Any) -> PackedRow:
        row = whole(*arguments, **named)
        return replace(row, labels=torch.roll(row.token_ids, -1))

    with patch.object(exchange, "lay_out_row", shifted):
        yield


@contextmanager
def _denominator() -> Iterator[None]:
    """A mean over each rank's own sequences, then over ranks."""
    whole = Policy.update

    def local(self: Policy, rows: Any, *, denominator: float, **named: Any) -> Any:
        mine = sum(int((row.coefficients != 0).sum()) for row in rows)
        counts = torch.tensor([float(mine)])
        torch.distributed.all_reduce(counts)
        share = mine / float(counts)
        return whole(self, rows, denominator=denominator * share * self.mesh.dp.size, **named)

    with patch.object(Policy, "update", local):
        yield


@contextmanager
def _micro_batch_mean() -> Iterator[None]:
    """megatron-core's own mean over micro-batches, on top of the division by the denominator."""
    whole = Policy.update

    def averaged(self: Policy, *arguments: Any, **named: Any) -> Any:
        self.model_config.calculate_per_token_loss = False
        return whole(self, *arguments, **named)

    with patch.object(Policy, "update", averaged):
        yield


@contextmanager
def _finalize() -> Iterator[None]:
    """Gradients that are never summed over ranks, stages and tied copies."""
    with patch.object(policy, "finalize_model_grads", lambda *_, **__: None):
        yield


@contextmanager
def _vocabulary() -> Iterator[None]:
    """Padding rows of the vocabulary that take part in the softmax."""
    whole = policy.label_logprobs

    def padded(logits: torch.Tensor, labels: torch.Tensor, *, vocab_size: int, tp: Any, **named: Any) -> torch.Tensor:
        return whole(logits, labels, vocab_size=logits.size(1) * tp.size, tp=tp, **named)

    with patch.object(policy, "label_logprobs", padded):
        yield


BREAKAGES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "sequence_parallel_mark": _sequence_parallel_mark,
    "label_shift": _label_shift,
    "denominator": _denominator,
    "micro_batch_mean": _micro_batch_mean,
    "finalize": _finalize,
    "vocabulary": _vocabulary,
}


def broken(name: str | None) -> AbstractContextManager[None]:
    """The context in which a protection is gone; an ordinary one for None."""
    return nullcontext() if name is None else BREAKAGES[name]()
