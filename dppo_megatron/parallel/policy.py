"""The policy: a sharded model with its optimizer, behind four verbs: weights out, log-probs, update, save."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from dppo_megatron import device
from dppo_megatron.architecture import Architecture
from dppo_megatron.batches import PackedRow, TokenLoss, TrainStats
from dppo_megatron.config.schema import PolicyConfig
from dppo_megatron.parallel import collectives, hf_weights
from dppo_megatron.parallel.engine_weights import stream_parts
from dppo_megatron.parallel.logprobs import label_logprobs
from dppo_megatron.parallel.mesh import Mesh
from dppo_megatron.parallel.model import build_chunk, transformer_config
from dppo_megatron.parallel.optimizer import build_optimizer, data_parallel_config
from dppo_megatron.parallel.regrouping import Regrouping
from dppo_megatron.parallel.rotary import rotary_frequencies
from dppo_megatron.parallel.row_layout import row_layout
from dppo_megatron.parallel.weight_source import open_source
from dppo_megatron.plan import layers_of_chunks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference policy: this rank's shard of the first weights, on the host, one tensor a parameter."""

    shards: tuple[Tensor, ...]


class Policy:
    """A Hugging Face model, sharded over the mesh and trained by megatron-core.

    chunks: this rank's parts of the model, in the order in which a row passes them; several where pipeline stages are
    interleaved.
    """

    def __init__(
        self,
        config: PolicyConfig,
        architecture: Architecture,
        *,
        source: Path,
        mesh: Mesh,
        rehearse_fp8: bool = False,
    ) -> None:
        """Build this rank's shard and load its weights from the Hugging Face directory ``source``.

        rehearse_fp8: emulate the section's FP8 recipe (``dppo.fp8_emulate``).
        """
        self.config, self.architecture, self.mesh = config, architecture, mesh
        megatron = config.megatron_cfg
        self.source = source
        virtual_pp = mesh.layout.virtual_pp
        stages = layers_of_chunks(architecture.num_layers, megatron=megatron, virtual_pp=virtual_pp)
        with device.megatron_calls():
            self.model_config = transformer_config(
                architecture,
                megatron,
                precision=config.precision,
                virtual_pp=virtual_pp,
                rehearse_fp8=rehearse_fp8,
            )
            self.networks = [
                build_chunk(
                    architecture,
                    self.model_config,
                    mesh=mesh,
                    number=number,
                    num_layers=len(layers),
                    rehearsed=megatron.fp8_cfg if rehearse_fp8 else None,
                )
                for number, layers in enumerate(stages[mesh.pp.rank])
            ]
            located = hf_weights.locate_parameters(self.networks, architecture, mesh=mesh, stages=stages)
            hf_weights.load_weights(located, open_source(source, architecture), mesh=mesh)
            self.chunks = [
                DistributedDataParallel(
                    config=self.model_config,
                    ddp_config=data_parallel_config(megatron),
                    module=network,
                    pg_collection=mesh.groups,
                )
                for network in self.networks
            ]
            self.optimizer, self.scheduler = build_optimizer(self.chunks, self.model_config, megatron=megatron)
        # DistributedDataParallel moves parameters into its own buffers: locate them again.
        self.parameters = hf_weights.locate_parameters(self.networks, architecture, mesh=mesh, stages=stages)
        self._connect_schedule()
        self._frequencies = rotary_frequencies(architecture).to(device.current())
        self._width = architecture.num_attention_heads * architecture.head_dim
        self.num_updates = 0

    def continue_schedule(self, num_updates: int) -> None:
        """Set the learning-rate schedule to where it stood after ``num_updates`` updates."""
        self.scheduler.step(increment=num_updates - self.num_updates)
        self.num_updates = num_updates

    def _connect_schedule(self) -> None:
        # The loss is already divided by our denominator: gradients are summed, and not divided by token counts.
        self.model_config.finalize_model_grads_func = lambda chunks, num_tokens, **rest: finalize_model_grads(
            chunks, None, **rest
        )
        self.model_config.grad_scale_func = self.optimizer.scale_loss
        if self.config.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce:
            self.model_config.no_sync_func = self._no_sync

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(chunk.no_sync())
            yield

    def hf_weights(self, *, engine_tp: int = 1) -> Iterator[tuple[str, Tensor]]:
        """Stream the weights under their Hugging Face names; called by every rank, whole and equal on every rank.

        The tensors may be views of the parameters: copy them. engine_tp: for engines of so many ranks, neighbours
        each; of a tensor then only the part is set that this rank of its engine takes.
        """
        bucket_bytes = int(self.config.refit_buffer_size_gb * 2**30)
        if engine_tp > 1:
            return stream_parts(self.parameters, mesh=self.mesh, engine_tp=engine_tp, bucket_bytes=bucket_bytes)
        return hf_weights.stream_weights(self.parameters, mesh=self.mesh, bucket_bytes=bucket_bytes)

    def reference(self) -> Reference:
        """Keep the present weights as the reference policy, off the device."""
        return Reference(tuple(device.pin(shard.to("cpu", copy=True)) for shard in self._shards()))

    def _shards(self) -> list[Tensor]:
        return [parameter.data for parameter in self.own_parameters()]

    def own_parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's parameters, chunk by chunk."""
        for network in self.networks:
            yield from network.parameters()

    @contextlib.contextmanager
    def _with_weights_of(self, reference: Reference) -> Iterator[None]:
        # Exchanged in place, one tensor at a time: parameters are views of the optimizer's buffers.
        def exchange() -> None:
            for shard, other in zip(self._shards(), reference.shards, strict=True):
                current = shard.clone()
                shard.copy_(other)
                other.copy_(current)

        exchange()
        try:
            yield
        finally:
            exchange()

    def attach_logprobs(
        self,
        rows: Sequence[PackedRow],
        *,
        old: bool,
        reference: Reference | None,
        temperature: float,
        regrouping: Regrouping | None = None,
    ) -> list[PackedRow]:
        """Give rows the log-probs of the present policy (``old``) and of the reference, where wanted.

        They are known on the last pipeline stage, where the loss is; elsewhere the rows come back as they were.
        regrouping: of these rows, for passes under a cap of their own; None runs them as they are.
        """
        rows = list(rows)
        if old:
            rows = self._attach(rows, "old_logprobs", temperature, regrouping)
        if reference is not None:
            with self._with_weights_of(reference):
                rows = self._attach(rows, "reference_logprobs", temperature, regrouping)
        return rows

    def _attach(
        self, rows: list[PackedRow], field: str, temperature: float, regrouping: Regrouping | None
    ) -> list[PackedRow]:
        logprobs = self.logprobs(rows if regrouping is None else regrouping.rows, temperature=temperature)
        if not self.mesh.pp.is_last:
            return rows
        if regrouping is not None:
            logprobs = regrouping.to_training_rows(logprobs)
        return [replace(row, **{field: values}) for row, values in zip(rows, logprobs, strict=True)]

    @torch.no_grad()
    def logprobs(self, rows: Sequence[PackedRow], *, temperature: float) -> list[Tensor]:
        """Log-probs of every row's labels, float32 [T] each, on the last pipeline stage; elsewhere an empty list."""

        def keep(row: PackedRow, logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            values = self._label_logprobs(row, logits, temperature)
            return values.new_zeros(()), values.new_zeros((), dtype=torch.int), values

        return self._run(rows, keep, forward_only=True)

    def _label_logprobs(self, row: PackedRow, logits: Tensor, temperature: float) -> Tensor:
        return label_logprobs(
            logits[0],
            row.labels,
            tp=self.mesh.tp,
            vocab_size=self.architecture.vocab_size,
            temperature=temperature,
            chunk_size=self.config.logprob_chunk_size,
        )

    def update(
        self, rows: Sequence[PackedRow], *, loss: TokenLoss, denominator: float, temperature: float
    ) -> TrainStats:
        """One optimizer step on the rows of this data-parallel rank.

        Minimises (sum of all ranks' row losses) / denominator. Equal statistics on every rank. Where the loss or a
        gradient of any rank is not finite, no rank steps: parameters, optimizer and schedule stay as they were.
        """

        sums = self._backward(
            rows, loss=loss, denominator=denominator, temperature=temperature, force_all_reduce=False
        )
        learning_rate = self.optimizer.param_groups[0]["lr"]
        objective, num_tokens, *metrics = self._total(sums, width=2 + len(loss.metric_names)).tolist()
        is_finite = math.isfinite(objective) and self._has_finite_gradients()
        skipped = collectives.any_rank(not is_finite, self.mesh.world)
        grad_norm = math.nan if skipped else self._step()
        return TrainStats(
            loss=objective,
            grad_norm=grad_norm,
            learning_rate=float(learning_rate),
            num_tokens=int(num_tokens),
            metrics=tuple(zip(loss.metric_names, (value / max(num_tokens, 1) for value in metrics), strict=True)),
            skipped=skipped,
        )

    def _step(self) -> float:
        """Clip, let the optimizer step, advance the schedule; returns the gradient's norm before clipping."""
        with device.megatron_calls():
            outcome: Any = self.optimizer.step()
            updated, grad_norm, _ = outcome
            self.continue_schedule(self.num_updates + 1)
        assert updated, "a skipped step: loss scaling is not used"
        return float(grad_norm or 0.0)

    def _has_finite_gradients(self) -> bool:
        # After the reduction: a value that is not finite on any data-parallel rank shows where its sum lies.
        chunks: list[Any] = list(self.chunks)  # megatron-core's ``buffers`` hides torch's method of that name
        buffers = (buffer for chunk in chunks for buffer in chunk.buffers)
        norms = [torch.linalg.vector_norm(buffer.grad_data, ord=math.inf) for buffer in buffers]
        return bool(torch.isfinite(torch.stack(norms)).all())

    def gradients(
        self, rows: Sequence[PackedRow], *, loss: TokenLoss, denominator: float, temperature: float
    ) -> Iterator[tuple[str, Tensor]]:
        """Stream the gradient that ``update`` would step along, whole, before clipping, under Hugging Face names.

        Called by every rank, equal on every rank; nothing is updated. The tensors may be views: copy them. A tied
        output layer's gradient is the embedding's and comes once.
        """
        # All ranks need the whole sum, also where the optimizer's shards make do with a part each.
        self._backward(rows, loss=loss, denominator=denominator, temperature=temperature, force_all_reduce=True)
        parameters: dict[int, Any] = {value.data_ptr(): value for value in self.own_parameters()}
        local = {name: parameters[shard.data_ptr()].main_grad for name, shard in self.parameters.local.items()}
        bucket_bytes = int(self.config.refit_buffer_size_gb * 2**30)
        located = replace(self.parameters, local=local)
        for name, tensor in hf_weights.stream_weights(located, mesh=self.mesh, bucket_bytes=bucket_bytes):
            if not (name == "lm_head.weight" and self.architecture.tied):
                yield name, tensor

    def _backward(
        self,
        rows: Sequence[PackedRow],
        *,
        loss: TokenLoss,
        denominator: float,
        temperature: float,
        force_all_reduce: bool,
    ) -> list[Tensor]:
        """Leave the gradient of the objective; returns each row's objective and metrics, on the last stage."""

        def divided_loss(row: PackedRow, logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            sums = loss(self._label_logprobs(row, logits, temperature), row)
            objective = sums.loss / denominator
            num_tokens = torch.ones((), dtype=torch.int, device=objective.device)
            return objective, num_tokens, torch.cat([objective.detach()[None], sums.metrics])

        with device.megatron_calls():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
                # Where reduction overlaps the backward pass it starts from the model's hooks, which read this.
                chunk.force_all_reduce = force_all_reduce
            self.optimizer.zero_grad()
        return self._run(rows, divided_loss, forward_only=False, force_all_reduce=force_all_reduce)

    def stay(self, loss: TokenLoss) -> TrainStats:
        """The statistics of an optimizer step that is not taken; one without a gradient would move it too."""
        return TrainStats(
            loss=0.0,
            grad_norm=0.0,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            num_tokens=0,
            metrics=tuple((name, 0.0) for name in loss.metric_names),
            idle=True,
        )

    def _total(self, sums: list[Tensor], *, width: int) -> Tensor:
        # The last stage holds the sums of its rows; one reduction over data and context, one broadcast along PP.
        total = torch.stack(sums).sum(0) if sums else torch.zeros(width, device=device.current())
        collectives.sum_over(total, self.mesh.dp_cp)
        return collectives.broadcast(total, self.mesh.pp, source=self.mesh.pp.size - 1).cpu()

    def _run(
        self,
        rows: Sequence[PackedRow],
        loss: Callable[[PackedRow, Tensor], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Run megatron-core's schedule over the rows; returns what ``loss`` keeps of each, on the last stage.

        Interleaved stages take a multiple of PP rows (``plan.rows_multiple``): RuntimeError by megatron-core else.
        """

        def forward_step(iterator: Iterator[PackedRow], model: torch.nn.Module) -> tuple[Tensor, Any]:
            row = next(iterator)
            with device.direct_calls():
                layout = row_layout(row, frequencies=self._frequencies, width=self._width, cp=self.mesh.cp)
                logits = model(row.token_ids[None], row.positions[None], None, packed_seq_params=layout)
            return logits, partial(direct_loss, row)

        def direct_loss(row: PackedRow, logits: Tensor) -> tuple[Tensor, Tensor, Any]:
            with device.direct_calls():
                return loss(row, logits)

        schedule = get_forward_backward_func()
        with device.megatron_calls():
            return schedule(
                forward_step_func=forward_step,
                data_iterator=[iter(rows) for _ in self.chunks],
                model=list(self.chunks),
                num_microbatches=len(rows),
                seq_length=1,  # unused: lengths vary
                micro_batch_size=1,
                forward_only=forward_only,
                force_all_reduce=force_all_reduce,
            )
