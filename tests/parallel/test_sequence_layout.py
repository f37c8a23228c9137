"""Rows in THD format, put together again from the shares of all context-parallel ranks."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.batches import Ragged
from dppo_megatron.parallel.sequence_layout import RowSequences, lay_out_row, zigzag_positions


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_bounds_tokens_and_labels_of_a_row_are_those_of_its_sequences(data: st.DataObject) -> None:
    cp = data.draw(st.sampled_from([1, 2, 3]))
    multiple = 2 * cp * data.draw(st.integers(1, 3)) if cp > 1 else data.draw(st.integers(1, 5))
    row_multiple = multiple * data.draw(st.integers(1, 4))
    token = st.integers(1, 99)
    pairs = data.draw(
        st.lists(
            st.tuples(st.lists(token, min_size=1, max_size=9), st.lists(token, min_size=1, max_size=9)), max_size=6
        )
    )
    sequences = RowSequences(
        prompts=Ragged.from_rows([prompt for prompt, _ in pairs]),
        completions=Ragged.from_rows([completion for _, completion in pairs]),
        sampled_logprobs=np.zeros(sum(len(completion) for _, completion in pairs), np.float32),
        advantages=np.arange(1.0, len(pairs) + 1),
        coefficients=np.ones(len(pairs)),
    )

    rows = [
        lay_out_row(sequences, sequence_multiple=multiple, row_multiple=row_multiple, cp_size=cp, cp_rank=rank)
        for rank in range(cp)
    ]

    padded = [-(-len(prompt + completion) // multiple) * multiple for prompt, completion in pairs]
    bounds = rows[0].cu_seqlens.tolist()
    assert bounds[: len(pairs) + 1] == [0, *np.cumsum(padded, dtype=int).tolist()]
    assert (np.diff(bounds) > 0).all()
    assert bounds[-1] % row_multiple == 0
    assert bounds[-1] - sum(padded) < row_multiple or not pairs
    assert all(row.cu_seqlens.tolist() == bounds for row in rows)
    places = zigzag_positions(rows[0].sequence_lengths, cp)
    assert sorted(places.ravel().tolist()) == list(range(bounds[-1]))
    whole = {}
    for name in ("token_ids", "labels", "positions", "advantages"):
        parts = torch.cat([getattr(row, name) for row in rows])
        whole[name] = parts[torch.from_numpy(places.ravel().argsort())].tolist()
    for index, (prompt, completion) in enumerate(pairs):
        tokens, start = prompt + completion, bounds[index]
        assert whole["token_ids"][start : start + len(tokens)] == tokens
        assert whole["labels"][start : start + len(tokens) - 1] == tokens[1:]
        assert whole["positions"][start : bounds[index + 1]] == list(range(padded[index]))
        trained = [0.0] * (len(prompt) - 1) + [index + 1.0] * len(completion)
        assert whole["advantages"][start : bounds[index + 1]] == trained + [0.0] * (padded[index] - len(trained))
    assert not any(whole["advantages"][sum(padded) :])
