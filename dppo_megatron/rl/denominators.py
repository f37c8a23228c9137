"""What the sum of a mini-batch's loss terms is divided by: that of the batch before pruning."""

import math
from typing import Literal, assert_never

from dppo_megatron.batches import IntArray, ScoredBatch
from dppo_megatron.config.schema import DppoConfig

DenominatorKind = Literal["sequences", "constant", "tokens", "estimated_tokens", "kept_sequences", "kept_tokens"]


def denominator_kind(dppo: DppoConfig, *, token_level: bool, prunes_prompts: bool) -> DenominatorKind:
    """The denominator of an objective: a mean over tokens (``token_level``) or over sequences.

    Raises: ValueError where ``dppo.denominator`` contradicts the objective, or would bias it unnoticed.
    """
    match dppo.denominator:
        case "candidates" if not token_level:
            return "sequences"
        case "candidates" if prunes_prompts:
            raise ValueError(
                "dppo.denominator: candidates; with loss_fn.token_level_loss: true and dppo.prompt_pruning "
                "the tokens of prompts that are never generated cannot be counted; allowed: "
                "loss_fn.token_level_loss: false (sequence mean), dppo.denominator: constant, or "
                "dppo.denominator: estimated_tokens (a ratio estimator, bias of order 1 / prompts)"
            )
        case "candidates":
            return "tokens"
        case "constant" | "estimated_tokens" if not token_level:
            raise ValueError(
                f"dppo.denominator: {dppo.denominator} divides sums over tokens; "
                "allowed with loss_fn.token_level_loss: false: candidates, kept"
            )
        case "constant" | "estimated_tokens":
            return dppo.denominator
        case "kept":
            return "kept_tokens" if token_level else "kept_sequences"
        case _:
            assert_never(dppo.denominator)


def minibatch_denominator(
    scores: ScoredBatch,
    *,
    kind: DenominatorKind,
    minibatch: int,
    generated: IntArray,
    kept: IntArray,
    max_new_tokens: int,
) -> float:
    """The denominator of one mini-batch, at least 1.

    generated: rows of all the mini-batch's sequences. kept: those of them that are trained on.
    """
    num_sequences = int(scores.prompts.num_candidates[minibatch]) * scores.num_generations
    match kind:
        case "sequences":
            denominator = num_sequences
        case "constant":
            denominator = num_sequences * max_new_tokens
        case "tokens":
            denominator = scores.completion_lengths[generated].sum()
        case "estimated_tokens":
            weights = scores.prompts.weights[scores.prompt_rows[generated]]
            # fsum rounds once: the order of the sequences does not matter.
            denominator = math.fsum(scores.completion_lengths[generated] * weights)
        case "kept_sequences":
            denominator = len(kept)
        case "kept_tokens":
            denominator = scores.completion_lengths[kept].sum()
        case _:
            assert_never(kind)
    return max(float(denominator), 1.0)
