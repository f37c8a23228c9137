"""The embedded engine's key-value cache: room for every token to come, written in place."""

from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


def reserve_cache(config: PreTrainedConfig, *, capacity: int) -> Cache:
    """An empty cache of a model whose layers attend to everything: sequences of ``capacity`` tokens at most.

    The prompts go through the model at once, ``batch_select_indices`` says which of them to continue and
    makes room for the rest, and tokens follow one by one.
    """
    return Cache(layers=[ReservedLayer(capacity) for _ in range(config.num_hidden_layers)])


class ReservedLayer(DynamicLayer):
    """A layer's keys and values [n, heads, tokens, head size], views of memory [n, heads, capacity, head size].

    transformers' DynamicLayer concatenates, so that each token copies all those before it.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take more tokens, [n, heads, tokens, head size]; returns all there are."""
        if not self.is_initialized:
            self.is_initialized = True
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        assert self._room, "rows are selected before the second token"
        assert end <= self._capacity, f"{end} tokens, of {self._capacity} at most"
        views = []
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
            views.append(room[:, :, :end])
        self.keys, self.values = keys, values = views
        return keys, values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` [m], which may repeat, in memory that has room for the capacity."""
        length = self.get_seq_length()
        rooms = []
        for states in (self.keys, self.values):
            assert states is not None, "nothing was cached yet"
            _, heads, _, size = states.shape
            room = states.new_empty((len(indices), heads, self._capacity, size))
            room[:, :, :length] = states[indices]
            rooms.append(room)
        keys, values = rooms
        self._room = keys, values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
