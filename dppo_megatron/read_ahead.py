"""Items made one ahead of their use, in a thread."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


def read_ahead(items: Iterable[_T]) -> Iterator[_T]:
    """Yield the items in order; while one is used, a thread makes the next, so two exist at a time.

    What making an item raises is raised where that item would have come.
    """
    iterator, end = iter(items), object()
    with ThreadPoolExecutor(max_workers=1) as pool:
        coming = pool.submit(next, iterator, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, iterator, end)
            yield item  # type: ignore[misc]
