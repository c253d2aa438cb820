"""Caches of compiled patterns: block masks with their tables."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_caches: list[Any] = []


def stores_masks(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """lru_cache for functions that compile patterns. `clear_cache` empties all of them."""

    def decorate(build):
        _caches.append(lru_cache(maxsize)(build))
        return _caches[-1]

    return decorate


def clear_cache() -> None:
    """Empties the caches of compiled patterns: block masks with their tables on all devices.

    sparseflash caches the masks of the most recent patterns, 128 of them for `attention`. Long
    sequences and many element masks can make them large. The next call of a pattern compiles it
    again. Masks that a caller or a graph of torch.compile holds are not affected. A CUDA graph
    holds none: if its calls were given patterns, it must not be replayed after this.
    """
    for cache in _caches:
        cache.cache_clear()
