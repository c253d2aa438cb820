"""Exact block-sparse attention for any sparsity pattern that you can write in Python."""

from importlib import import_module
from typing import TYPE_CHECKING

from sparseflash._shadowing import check_masks

check_masks()

if TYPE_CHECKING:
    from sparseflash._api import *
    from sparseflash.testing.selfcheck import selfcheck

__version__ = "0.1.0"
__all__ = [
    "AttentionOptions",
    "BackendError",
    "Explanation",
    "ScoreFunction",
    "alibi",
    "attention",
    "attention_varlen",
    "block_mass",
    "clear_cache",
    "explain",
    "merge_attention",
    "nn",
    "pad",
    "relative_bias",
    "selfcheck",
    "unpad",
    "warmup",
]

# Not in _api, for they need libraries that take long to import: the module, and the name in it.
_ON_DEMAND = {
    "advisor": ("sparseflash.advisor", None),
    "diffusers": ("sparseflash.integrations.diffusers", None),
    "distributed": ("sparseflash.distributed", None),
    "huggingface": ("sparseflash.integrations.huggingface", None),
    "io_model": ("sparseflash.io_model", None),
    "lab": ("sparseflash.lab", None),
    "reference": ("sparseflash.reference", None),
    "sparsify": ("sparseflash.integrations.huggingface", "sparsify"),
    "replace_sdpa": ("sparseflash.integrations.sdpa", "replace_sdpa"),
    "selfcheck": ("sparseflash.testing.selfcheck", "selfcheck"),
    "testing": ("sparseflash.testing", None),
}


def __getattr__(name: str):
    """A public name, imported at its first use: torch takes seconds, and `--help` needs none."""
    if name not in {*__all__, *_ON_DEMAND}:
        raise AttributeError(f"module 'sparseflash' has no attribute {name!r}")
    module, attribute = _ON_DEMAND.get(name, ("sparseflash._api", name))
    with import_module("masks._core.tracing").untraced():  # modules have tensors
        imported = import_module(module)
    globals()[name] = imported if attribute is None else getattr(imported, attribute)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ON_DEMAND})
