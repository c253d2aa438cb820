"""Exact block-sparse attention for any sparsity pattern that you can write in Python."""

from importlib import import_module
from typing import TYPE_CHECKING

from sparseflash._shadowing import check_masks

check_masks()

from masks._program import is_starting

if not is_starting():
    from sparseflash import nn
    from sparseflash._attention import attention
    from sparseflash._block_mass import block_mass
    from sparseflash._explain import explain
    from sparseflash._warmup import warmup
    from sparseflash.backends.base import BackendError
    from sparseflash.bias import alibi, relative_bias
    from sparseflash.compiled import clear_cache
    from sparseflash.merge import merge_attention
    from sparseflash.options import AttentionOptions
    from sparseflash.score import ScoreFunction
    from sparseflash.varlen import attention_varlen, pad, unpad

if TYPE_CHECKING:
    from sparseflash.testing.selfcheck import selfcheck

__version__ = "0.1.0"
__all__ = [
    "AttentionOptions",
    "BackendError",
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

# Imported at their first use, for they need libraries that take long to import.
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
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'sparseflash' has no attribute {name!r}")
    module, attribute = _ON_DEMAND[name]
    found = import_module(module)
    return found if attribute is None else getattr(found, attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})
