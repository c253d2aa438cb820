"""Sparsity patterns, their algebra, and the lookup tables that kernels read."""

from masks._program import is_starting

if not is_starting():
    from masks import interop
    from masks._parse import parse
    from masks._pattern import Pattern, block_pattern, pattern, stack
    from masks.block_mask import BlockMask, DynamicMask
    from masks.lookup_table import BlockLists, LookupTable
    from masks.mask_batch import MaskBatch
    from masks.patterns import (
        bigbird,
        butterfly,
        causal,
        dilated,
        documents,
        full,
        global_tokens,
        local,
        longformer,
        neighborhood2d,
        random,
        strided,
        tree,
    )
    from masks.serialize import from_json, load, save, to_json

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
