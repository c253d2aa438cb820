"""Sparsity patterns, their algebra, and the lookup tables that kernels read."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from masks._api import *

__all__ = [
    "BlockLists",
    "BlockMask",
    "DynamicMask",
    "LookupTable",
    "MaskBatch",
    "Pattern",
    "bigbird",
    "block_pattern",
    "butterfly",
    "causal",
    "dilated",
    "documents",
    "from_json",
    "full",
    "global_tokens",
    "interop",
    "load",
    "local",
    "longformer",
    "neighborhood2d",
    "parse",
    "pattern",
    "random",
    "save",
    "stack",
    "strided",
    "to_json",
    "tree",
]


def __getattr__(name: str):
    """A public name, imported at its first use: torch takes seconds, and `--help` needs none."""
    if name not in __all__:
        raise AttributeError(f"module 'masks' has no attribute {name!r}")
    with import_module("masks._core.tracing").untraced():  # modules have tensors
        globals()[name] = getattr(import_module("masks._api"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
