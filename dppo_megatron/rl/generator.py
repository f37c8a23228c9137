"""Rollouts: the protocol of an engine, and the engine that runs the Hugging Face model in process."""

from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedConfig
from transformers.initialization import no_init_weights

from dppo_megatron.batches import (
    FinishReason,
    FloatArray,
    IntArray,
    PromptBatch,
    Ragged,
    RolloutBatch,
    Sampling,
)
from dppo_megatron.rl.draws import Draws, hash_parts, to_unit_interval
from dppo_megatron.rl.kv_cache import reserve_cache


class NonFiniteLogitsError(RuntimeError):
    """Weights under which nothing can be sampled: their logits are not finite."""


class Generator(Protocol):
    """What samples completions under weights that it is handed.

    tensor_parallel_size: ranks that make up one engine; each uses its own part of the weights only.
    """

    tensor_parallel_size: int

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take a stream of (Hugging Face name, whole tensor), read to its end, as weights ``version``."""
        ...

    def generate(self, prompts: PromptBatch, draws: Draws, sampling: Sampling) -> RolloutBatch:
        """Sample completions of every prompt of this rank's share, which may be empty.

        Raises: RuntimeError where the engine fails, NonFiniteLogitsError where it is the weights that do.
        """
        ...

    def close(self) -> None:
        """Give back what the engine holds outside of Python's memory; called once, while process groups stand."""
        ...


class EmbeddedGenerator:
    """The Hugging Face model in process, with a key-value cache.

    A completion is a function of the weights and of its own key (seed, step, purpose, prompt id, occurrence,
    index): not of the other requests, their order or the ranks, up to ties in floating point.
    """

    tensor_parallel_size = 1

    def __init__(
        self, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device, max_cache_tokens: int
    ) -> None:
        """Build the model without weights; ``max_cache_tokens`` bounds sequences x tokens of one batch."""
        with no_init_weights():
            # A copy, because building a model writes the attention's kind into its configuration.
            model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype, attn_implementation="sdpa")
        model.tie_weights()
        self._model = model.to(device).eval().requires_grad_(False)
        self._device = device
        self._max_cache_tokens = max_cache_tokens
        self._version: int | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy the stream into the model; a tied weight is taken once, under its first name.

        Raises: RuntimeError for a name that is unknown or comes twice, a wrong shape, a parameter left out.
        """
        pending = dict(self._model.named_parameters())
        tied = {name for name, _ in self._model.named_parameters(remove_duplicate=False)} - pending.keys()
        self._version = None
        with torch.no_grad():
            for name, tensor in weights:
                if name in tied:
                    continue
                parameter = pending.pop(name, None)
                if parameter is None:
                    raise RuntimeError(f"weight stream: {name} is unknown to the engine, or came twice")
                if parameter.shape != tensor.shape:
                    shapes = f"{tuple(tensor.shape)}, the engine needs {tuple(parameter.shape)}"
                    raise RuntimeError(f"weight stream: {name} has shape {shapes}")
                parameter.copy_(tensor)
        if pending:
            raise RuntimeError(f"weight stream: nothing came for {', '.join(pending)}")
        self._version = version

    def generate(self, prompts: PromptBatch, draws: Draws, sampling: Sampling) -> RolloutBatch:
        """Sample G completions a prompt, in batches that fit the cache.

        Raises: RuntimeError before weights were loaded, or where logits are not finite. ValueError where
        one sequence exceeds the cache.
        """
        if self._version is None:
            raise RuntimeError("the engine has no weights: load_weights comes first")
        size = sampling.num_generations
        limits = np.repeat(sampling.new_token_limits(prompts.tokens.lengths), size)
        width = int(limits.max(initial=0))
        seeds = draws.words(
            sampling.purpose, prompts.prompt_ids[:, None], prompts.occurrences[:, None], np.arange(size)
        ).ravel()
        sampled = np.zeros((len(seeds), width), np.int32)
        logprobs = np.zeros((len(seeds), width), np.float32)
        lengths = np.repeat(prompts.tokens.lengths, size) + limits
        for rows in _cache_batches(lengths, max_cache_tokens=self._max_cache_tokens):
            distinct, copies = np.unique(rows // size, return_inverse=True)
            longest = int(limits[rows].max())
            uniforms = to_unit_interval(hash_parts(seeds[rows, None], np.arange(longest)))
            sampled[rows, :longest], logprobs[rows, :longest] = self._decode(
                prompts.tokens.take(distinct),
                copies=copies,
                uniforms=uniforms,
                limits=limits[rows],
                sampling=sampling,
            )
        return _to_rollouts(
            sampled, logprobs=logprobs, limits=limits, prompts=prompts, sampling=sampling, version=self._version
        )

    def close(self) -> None:
        """Nothing: the model is memory alone."""

    @torch.inference_mode()
    def _decode(
        self, prompts: Ragged, *, copies: IntArray, uniforms: FloatArray, limits: IntArray, sampling: Sampling
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Sample one batch: token ids and log-probabilities [n, steps], void behind a stop token or the limit.

        copies: [n], the row of ``prompts`` that each sequence continues. uniforms: [n, steps]. limits: [n],
        tokens of each sequence at most; the largest is ``steps``.
        """
        steps = uniforms.shape[1]
        token_ids, mask, positions = self._left_pad(prompts, limit=steps)
        width = token_ids.shape[1]
        # The group shares its prompt's forward pass: the cache is repeated behind it.
        cache = reserve_cache(self._model.config, capacity=width + steps - 1)
        logits = self._forward(token_ids, mask=mask[:, :width], positions=positions[:, :width], cache=cache)
        repeats = torch.from_numpy(copies).to(self._device)
        cache.batch_select_indices(repeats)
        logits, mask, positions = logits[repeats], mask[repeats], positions[repeats]

        draws = torch.from_numpy(uniforms).to(self._device)
        last_steps = torch.from_numpy(limits - 1).to(self._device)
        stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self._device)
        sampled = torch.zeros(uniforms.shape, dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(uniforms.shape, dtype=torch.float32, device=self._device)
        alive = torch.arange(len(draws), device=self._device)
        done = torch.zeros(len(draws), dtype=torch.bool, device=self._device)
        for step in range(steps):
            tokens, values = _sample(logits, uniforms=draws[alive, step], temperature=sampling.temperature)
            sampled[alive, step], logprobs[alive, step] = tokens, values
            done |= torch.isin(tokens, stop) | (last_steps[alive] <= step)
            remaining = torch.nonzero(~done).squeeze(1)  # the only wait for the device in a step
            if not len(remaining) or step + 1 == steps:
                break
            # Finished rows run on until half are done: selecting copies the whole cache.
            if 2 * len(remaining) <= len(alive):
                cache.batch_select_indices(remaining)
                alive, tokens, done = alive[remaining], tokens[remaining], done[remaining]
                mask, positions = mask[remaining], positions[remaining]
            end = width + step + 1
            logits = self._forward(
                tokens[:, None], mask=mask[:, :end], positions=positions[:, end - 1 : end], cache=cache
            )
        return sampled.cpu().numpy(), logprobs.cpu().numpy()

    def _forward(self, token_ids: Tensor, *, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits of the last position [n, V]; the cache grows by ``token_ids`` [n, tokens]."""
        # By position, because the cache's keyword differs between versions and a wrong one is swallowed.
        output = self._model(token_ids, mask, positions, cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]

    def _left_pad(self, prompts: Ragged, *, limit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids [n, L], and mask and positions [n, L + limit] that reach over the tokens to come."""
        lengths = prompts.lengths[:, None]
        assert (lengths > 0).all(), "a prompt has at least one token"
        width = int(lengths.max())
        columns = np.arange(width + limit) - (width - lengths)
        token_ids = np.zeros((len(prompts), width), np.int64)
        token_ids[columns[:, :width] >= 0] = prompts.values
        mask, positions = torch.from_numpy(columns >= 0), torch.from_numpy(np.maximum(columns, 0))
        return torch.from_numpy(token_ids).to(self._device), mask.to(self._device), positions.to(self._device)


def _cache_batches(lengths: IntArray, *, max_cache_tokens: int) -> Iterator[IntArray]:
    """Split sequences [N] into batches of like lengths, longest first, that fit the cache when padded."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        if longest > max_cache_tokens:
            raise ValueError(
                f"dppo.rollout.max_cache_tokens: {max_cache_tokens}; allowed: at least {longest}, "
                "the longest prompt with its new tokens"
            )
        stop = start + max_cache_tokens // longest
        yield order[start:stop]
        start = stop


def _sample(logits: Tensor, *, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the distribution function; temperature 0 takes the likeliest.

    logits: [n, V]. uniforms: float64 [n]. Returns token ids int64 [n] and their log-probabilities float32
    [n], under the sampling distribution (greedy: at temperature 1). In float64, so that the distribution's
    tail is sampled too. One draw a token; Gumbel noise would be as exact, but needs V draws a token.
    """
    if temperature == 0:
        log_distribution = torch.log_softmax(logits.double(), dim=-1)
        tokens = log_distribution.argmax(dim=-1, keepdim=True)
    else:
        log_distribution = torch.log_softmax(logits.double() / temperature, dim=-1)
        cumulative = log_distribution.exp().cumsum(dim=-1)
        # Scaled by the sum, which misses 1 by rounding; a token of probability 0 spans no interval.
        thresholds = uniforms[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), log_distribution.gather(1, tokens).squeeze(1).float()


def _to_rollouts(
    sampled: NDArray[np.int32],
    *,
    logprobs: NDArray[np.float32],
    limits: IntArray,
    prompts: PromptBatch,
    sampling: Sampling,
    version: int,
) -> RolloutBatch:
    """Cut rows [N, steps] behind their first stop token, or at their limits [N]."""
    if not np.isfinite(logprobs).all():
        raise NonFiniteLogitsError(f"sampling: the model's logits are not finite (weights of version {version})")
    columns = np.arange(sampled.shape[1])
    hits = np.isin(sampled, sampling.stop_token_ids) & (columns < limits[:, None])
    stopped = hits.any(axis=1)
    lengths = np.where(stopped, hits.argmax(axis=1) + 1, limits) if len(columns) else limits
    inside = columns < lengths[:, None]
    return RolloutBatch(
        prompts=prompts,
        completions=Ragged.from_lengths(sampled[inside], lengths),
        sampled_logprobs=logprobs[inside],
        finish_reasons=np.where(stopped, FinishReason.STOP, FinishReason.LENGTH).astype(np.int64),
        version=version,
    )
