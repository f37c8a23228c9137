"""Which rank holds a prompt's completions."""

import numpy as np

from dppo_megatron.batches import IntArray, ScoredBatch


def owners_of(scores: ScoredBatch, *, num_ranks: int) -> IntArray:
    """The generating rank of each prompt, int64 [P]: as recorded, or dealt out in turn."""
    return np.arange(len(scores.prompts)) % num_ranks if scores.owners is None else scores.owners


def places_on_owners(owners: IntArray) -> IntArray:
    """How many earlier prompts each prompt's rank generated for, int64 [P]: its place among that rank's prompts."""
    order = np.argsort(owners, kind="stable")
    _, starts, sizes = np.unique(owners[order], return_index=True, return_counts=True)
    places = np.empty(len(owners), np.int64)
    places[order] = np.arange(len(owners)) - np.repeat(starts, sizes)
    return places
