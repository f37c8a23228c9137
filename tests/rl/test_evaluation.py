from collections.abc import Iterable

import numpy as np
import pytest
from torch import Tensor

from dppo_megatron.batches import FloatArray, PromptBatch, Purpose, Ragged, RolloutBatch, Sampling
from dppo_megatron.rl.draws import Draws
from dppo_megatron.rl.evaluation import Evaluation, EvaluationSums, evaluate

SAMPLING = Sampling(
    num_generations=3, temperature=1.0, max_new_tokens=4, stop_token_ids=(1,), purpose=Purpose.VALIDATION
)
REWARDS = np.array([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.25, 0.0, 0.5], [1.0, 1.0, 1.0]])
LENGTHS = np.array([[1, 2, 3], [4, 4, 4], [2, 2, 2], [1, 1, 4]])


class FixedGenerator:
    """Completions of known lengths; those of 4 tokens were cut."""

    tensor_parallel_size = 1

    def close(self) -> None:
        raise AssertionError("evaluation closes nothing")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        raise NotImplementedError

    def generate(self, prompts: PromptBatch, draws: Draws, sampling: Sampling) -> RolloutBatch:
        lengths = LENGTHS[prompts.prompt_ids].ravel()
        return RolloutBatch(
            prompts=prompts,
            completions=Ragged.from_lengths(np.ones(lengths.sum(), np.int32), lengths),
            sampled_logprobs=np.zeros(lengths.sum(), np.float32),
            finish_reasons=(lengths == 4).astype(np.int64),
            version=0,
        )


PROMPTS = PromptBatch(
    prompt_ids=np.arange(4),
    occurrences=np.zeros(4, np.int64),
    minibatches=np.zeros(4, np.int64),
    tokens=Ragged.from_rows([(2,)] * 4),
    texts=("",) * 4,
    answers=("",) * 4,
    weights=np.ones(4),
    num_candidates=np.array([4]),
)


def score(rollouts: RolloutBatch) -> FloatArray:
    return REWARDS[rollouts.prompts.prompt_ids].ravel()


def sums_of(prompts: PromptBatch) -> EvaluationSums:
    return evaluate(FixedGenerator(), prompts=prompts, draws=Draws(0, 0), sampling=SAMPLING, score=score)


def test_an_evaluation_is_the_mean_over_samples_and_the_best_of_each_prompt() -> None:
    evaluation = Evaluation.from_sums(sums_of(PROMPTS))
    assert evaluation.accuracy == pytest.approx(5.75 / 12)
    assert evaluation.pass_at_k == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert evaluation.mean_length == pytest.approx(30 / 12)
    assert evaluation.stop_fraction == pytest.approx(8 / 12)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_sums_over_ranks_give_the_evaluation_of_the_whole(size: int) -> None:
    shares = [sums_of(PROMPTS.share(rank=rank, size=size)).to_array() for rank in range(size)]
    total = EvaluationSums.from_array(np.sum(shares, axis=0))
    assert total == sums_of(PROMPTS)


def test_validation_refuses_the_random_stream_of_training() -> None:
    sampling = Sampling(num_generations=3, temperature=1.0, max_new_tokens=4, stop_token_ids=(1,))
    with pytest.raises(AssertionError, match="random stream"):
        evaluate(FixedGenerator(), prompts=PROMPTS, draws=Draws(0, 0), sampling=sampling, score=score)
