import torch
from transformers import DynamicCache, Qwen3Config

from dppo_megatron.rl.kv_cache import reserve_cache

CONFIG = Qwen3Config(num_hidden_layers=2)
ROWS = torch.tensor([1, 0, 1])
LEFT = torch.tensor([2, 0])


def states(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 3, tokens, 4), torch.randn(rows, 3, tokens, 4)


def test_it_returns_what_a_cache_that_copies_returns_and_writes_in_place() -> None:
    torch.manual_seed(0)
    ours, theirs = reserve_cache(CONFIG, capacity=9), DynamicCache(config=CONFIG)
    for layer in range(2):
        prompts = states(2, 5)
        ours.update(*prompts, layer)
        theirs.update(*prompts, layer)
    for cache in (ours, theirs):
        cache.batch_select_indices(ROWS)
    places = []
    for rows, chosen in ((3, None), (3, LEFT), (2, None), (2, None)):
        for layer in range(2):
            token = states(rows, 1)
            got, expected = ours.update(*token, layer), theirs.update(*token, layer)
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
            places.append(got[0].data_ptr())
        if chosen is not None:
            for cache in (ours, theirs):
                cache.batch_select_indices(chosen)
        assert ours.get_seq_length() == theirs.get_seq_length()
    for layer in range(2):
        before, at_the_selection, after, last = places[layer::2]
        assert (before, after) == (at_the_selection, last), "tokens alone move nothing"
