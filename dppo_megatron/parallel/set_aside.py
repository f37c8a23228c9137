"""What only training needs, off the device while a colocated engine samples on it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dppo_megatron import device


@contextmanager
def training_state_set_aside(chunks: Sequence[Any], optimizer: Any) -> Iterator[None]:
    """Free the gradients' buffers and move the optimizer's state to the host; put all back, however it ends.

    chunks: megatron-core's DistributedDataParallel each; gradients are lost, and zero afterwards. optimizer:
    megatron-core's, with main parameters of its own: where it holds the model's themselves they would go too.
    """
    with device.megatron_calls():
        optimizer.zero_grad()
        for chunk in chunks:
            chunk.offload_grad_buffers()
        optimizer.offload_to_cpu()
    try:
        yield
    finally:
        with device.megatron_calls():
            optimizer.restore_from_cpu()
            for chunk in chunks:
                chunk.restore_grad_buffers()
