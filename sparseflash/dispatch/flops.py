"""FLOPs of the operators, as torch.utils.flop_counter.FlopCounterMode counts them.

They are useful FLOPs: those of the products of all pairs in non-zero blocks, inside the sequence.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from masks import BlockMask, DynamicMask, MaskBatch, Pattern
from masks._core.grid import is_captured
from masks._core.tracing import untraced
from masks.analysis.counts import computed_pairs
from masks.registry import find
from sparseflash.arguments import are_plain
from sparseflash.dispatch.plan import compiled_pattern


def register(formulas: Mapping[Any, Callable[..., int]]) -> None:
    """Lets FlopCounterMode count operators, if its module is imported.

    The module imports Triton, so it is not imported here. A counter copies all formulas when it is
    made, which may be before the first use of sparseflash. So those that count now get them too.

    Args:
        formulas: A function of the arguments of each operator (OpOverloadPacket).
    """
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    for operator, formula in formulas.items():
        if operator not in module.flop_registry:
            module.register_flop_formula(operator, get_raw=True)(formula)
    for mode in _get_current_dispatch_mode_stack():
        counter = cast(Any, getattr(mode, "counter", None))
        if isinstance(counter, module.FlopCounterMode):
            for operator in formulas:
                counter.flop_registry.setdefault(operator, module.flop_registry[operator])


def of_forward(bound: Mapping[str, Any]) -> int:
    """2 d for each pair and product, with d the head dim in Q Kᵀ and the value dim in P V.

    Args:
        bound: The arguments of the operator by name.
    """
    return 2 * _pairs(bound) * (bound["query"].shape[3] + bound["value"].shape[3])


def of_backward(bound: Mapping[str, Any]) -> int:
    """2 d for each pair and product: Q Kᵀ, dO Vᵀ, and one for each of dQ, dK and dV.

    Args:
        bound: The arguments of the operator by name. Products of gradients that it does not need
            are not counted.
    """
    head_dim, value_dim = bound["query"].shape[3], bound["value"].shape[3]
    query, key, value, *others = bound["needs"]
    dims = head_dim + head_dim * (query + key) + value_dim * value
    if query or key or any(others):  # dO Vᵀ is a part of dS
        dims += value_dim
    return 2 * _pairs(bound) * dims


def _pairs(bound: Mapping[str, Any]) -> int:
    """The number of pairs in non-zero blocks, of all batch elements and query heads."""
    query, key, blocks = (bound[name] for name in ("query", "key", "blocks"))
    batch, heads, q_len, _ = query.shape
    k_len, mask = key.shape[2], find(bound["mask"])
    q_known, k_known = (x.node.hint if isinstance(x, torch.SymInt) else x for x in (q_len, k_len))
    with untraced():
        if isinstance(mask, Pattern):
            if q_known is None or k_known is None:  # then all pairs are the most that can attend
                return batch * heads * q_len * k_len
            # Of tensors without values the machine may not have the device.
            device = query.device if are_plain(query) else torch.device("cpu")
            mask = compiled_pattern(mask, q_known, k_known, device)
        # Of blocks without values, those of the support are the most that can be selected.
        if blocks is not None and are_plain(blocks) and not is_captured(blocks.device):
            mask = mask.select(blocks)
        pairs = _pairs_of_selected(mask) if isinstance(mask, DynamicMask) else _pairs_of(mask)
    return pairs * (batch // mask.num_batches) * (heads // mask.num_heads)


def _pairs_of(mask: BlockMask | MaskBatch) -> int:
    """The number of pairs in non-zero blocks of all masks, cached with the mask."""
    if "computed pairs" not in mask.cache:
        stacked = mask.stacked if isinstance(mask, MaskBatch) else mask
        mask.cache["computed pairs"] = computed_pairs(stacked)
    return mask.cache["computed pairs"]


def _pairs_of_selected(mask: DynamicMask) -> int:
    """The number of pairs in non-zero blocks of all masks; waits for the device."""
    grid = mask.grid
    queries, keys = (
        (length - torch.arange(count, device=mask.blocks.device) * side).clamp(max=side)
        for length, count, side in ((grid.q_len, grid.nq, grid.bq), (grid.k_len, grid.nk, grid.bk))
    )
    return int((mask.to_blocks() * keys).sum(-1).mul(queries).sum())
