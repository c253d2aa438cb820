"""Caches of compiled patterns: block masks with their tables."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
_caches: list[Any] = []
_of_graphs: dict[int, object] = {}  # masks by id


def stores_masks(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """lru_cache for functions that compile patterns. `clear_cache` empties all of them.

    Masks that are asked for while a CUDA graph is captured are held until the process ends,
    because each replay reads their tables.
    """

    def decorate(build: Any) -> Any:
        cached: Any = lru_cache(maxsize)(build)
        _caches.append(cached)

        @wraps(build)
        def stored(*arguments: Any, **keywords: Any) -> object:
            mask = cached(*arguments, **keywords)
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                _of_graphs[id(mask)] = mask
            return mask

        found: Any = stored
        found.cache_clear, found.cache_info = cached.cache_clear, cached.cache_info
        return found

    return decorate


def clear_cache() -> None:
    """Empties the caches of compiled patterns: block masks with their tables on all devices.

    sparseflash caches the masks of the most recent patterns, 128 of them for `attention`. Long
    sequences and many element masks can make them large. The next call of a pattern compiles it
    again. Masks that a caller or a graph of torch.compile holds, or that a CUDA graph reads,
    are not affected.
    """
    for cache in _caches:
        cache.cache_clear()
