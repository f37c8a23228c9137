"""When log-probs are computed anew, and in which rows; the run is a stand-in that notes what it was asked for."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dppo_megatron.batches import PackedRow, PrunedBatch, Ragged
from dppo_megatron.config.schema import LossConfig, PolicyConfig, SequencePackingConfig
from dppo_megatron.parallel.sequence_layout import RowSequences, lay_out_row
from dppo_megatron.plan import Layout
from dppo_megatron.rl.packing import PackingReport
from dppo_megatron.run_setup import Run
from dppo_megatron.stages import MiniBatch, attach_logprobs

CAPACITY = 64


class NotingPolicy:
    """Notes the calls for log-probs; gives the rows back."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def attach_logprobs(self, rows: list[PackedRow], **asked: Any) -> list[PackedRow]:
        self.calls.append(asked)
        return rows


def make_run(
    *, num_minibatches: int = 1, logprob_mb_tokens: int = CAPACITY, reference: object = None, forced: bool = False
) -> tuple[Run, NotingPolicy]:
    """A run of one process, in as much as the pass for log-probs looks at it."""
    packing = SequencePackingConfig(train_mb_tokens=CAPACITY, logprob_mb_tokens=logprob_mb_tokens)
    policy = NotingPolicy()
    run = SimpleNamespace(
        config=SimpleNamespace(
            loss_fn=replace(LossConfig(), force_on_policy_ratio=forced),
            policy=PolicyConfig(model_name="toy", sequence_packing=packing),
            dppo=SimpleNamespace(packing=SimpleNamespace(window=None)),
        ),
        inputs=SimpleNamespace(architecture=SimpleNamespace(attention_weight=0.0)),
        mesh=SimpleNamespace(
            cp=SimpleNamespace(size=1), layout=Layout(tp=1, pp=1, cp=1, dp=1, sequence_parallel=False)
        ),
        num_minibatches=num_minibatches,
        policy=policy,
        reference=reference,
        sampling=SimpleNamespace(temperature=1.0),
    )
    return cast(Run, run), policy


def make_batch(lengths: list[int]) -> MiniBatch:
    """One row of sequences with a prompt of one token each."""
    array = np.array(lengths, np.int64)
    row = lay_out_row(
        RowSequences(
            prompts=Ragged.from_rows([[1]] * len(lengths)),
            completions=Ragged.from_rows([list(range(2, length + 1)) for length in lengths]),
            sampled_logprobs=np.zeros(array.sum() - len(lengths), np.float32),
            advantages=np.ones(len(lengths)),
            coefficients=np.ones(len(lengths)),
        ),
        sequence_multiple=1,
        row_multiple=1,
        cp_size=1,
        cp_rank=0,
    )
    return MiniBatch(cast(PrunedBatch, None), [row], cast(PackingReport, None))


@pytest.mark.parametrize("forced", [False, True])
def test_on_policy_no_log_probs_are_computed_anew(forced: bool) -> None:
    run, policy = make_run(num_minibatches=2 if forced else 1, forced=forced)
    batch = make_batch([30, 20])
    assert attach_logprobs(run, batch) is batch
    assert not policy.calls


def test_old_log_probs_are_computed_where_an_earlier_step_moves_the_policy_and_the_reference_s_where_wanted() -> None:
    reference = object()
    for num_minibatches, wanted, old in ((2, None, True), (1, reference, False), (2, reference, True)):
        run, policy = make_run(num_minibatches=num_minibatches, reference=wanted)
        attach_logprobs(run, make_batch([30, 20]))
        (call,) = policy.calls
        assert (call["old"], call["reference"]) == (old, wanted)
        assert call["regrouping"] is None, "equal caps run the training rows"


def test_a_cap_of_their_own_gives_the_log_probs_rows_of_their_own() -> None:
    run, policy = make_run(num_minibatches=2, logprob_mb_tokens=32)
    attach_logprobs(run, make_batch([30, 20, 11]))
    (call,) = policy.calls
    assert sorted(len(row.token_ids) for row in call["regrouping"].rows) == [30, 31]
