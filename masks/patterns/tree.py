from collections.abc import Sequence

import torch

from masks._core.grid import Grid
from masks._pattern import Pattern, builtin
from masks.arguments import check_integer, check_integers
from masks.block_mask import BlockMask
from masks.builders import from_intervals, paste


@builtin()
def tree(parents: Sequence[int], prefix_len: int = 0) -> Pattern:
    """A token tree over a cached prefix: node q attends the prefix, its ancestors and itself.

    The queries are the nodes; the keys are the cached tokens and then the nodes.

    Args:
        parents: The parent of each node: an earlier node, or -1 for a root.
        prefix_len: Number of cached tokens.

    Raises:
        ValueError: A parent is neither an earlier node nor -1, there is no node, or prefix_len is
            below 0. In a call of the pattern: seq_len is not (nodes, prefix_len + nodes).

    Reference:
        Miao et al. 2023, SpecInfer.
    """
    parents, prefix_len = (
        check_integers("parents", parents),
        check_integer("prefix_len", prefix_len, least=0),
    )
    if not parents or not all(-1 <= parent < node for node, parent in enumerate(parents)):
        raise ValueError(f"parents must have an earlier node or -1 for each node, got {parents}")
    nodes = len(parents)

    def build(grid: Grid) -> BlockMask:
        if grid.seq_len != (nodes, prefix_len + nodes):
            raise ValueError(
                f"seq_len must be {(nodes, prefix_len + nodes)} for a tree of {nodes} nodes after "
                f"{prefix_len} tokens, got {grid.seq_len}"
            )
        ancestors = torch.eye(nodes, dtype=torch.bool, device="cpu")
        for node, parent in enumerate(parents):
            if parent >= 0:
                ancestors[node] |= ancestors[parent]
        begin = torch.zeros(nodes, dtype=torch.int64, device=grid.device)
        prefix = from_intervals(grid, begin, begin + prefix_len)
        own = BlockMask.from_dense(ancestors.to(grid.device), grid.block_size)
        return prefix | paste(grid, [(own, 0, prefix_len)])

    return Pattern(f"tree({nodes} nodes, prefix_len={prefix_len})", build, of_tokens=True)
