import numpy as np
import pytest

from dppo_megatron.batches import PromptBatch, Ragged, RolloutBatch
from dppo_megatron.rl.evaluation import Evaluation, EvaluationSums

REWARDS = np.array([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.25, 0.0, 0.5], [1.0, 1.0, 1.0]])
LENGTHS = np.array([[1, 2, 3], [4, 4, 4], [2, 2, 2], [1, 1, 4]])


def generate(prompts: PromptBatch) -> RolloutBatch:
    """Completions of known lengths; those of 4 tokens were cut."""
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


def sums_of(prompts: PromptBatch) -> EvaluationSums:
    return EvaluationSums.of(generate(prompts), REWARDS[prompts.prompt_ids].ravel(), num_generations=3)


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
