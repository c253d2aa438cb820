"""Positions of the tokens, and indices of the heads, of a call that has only some of all.

`positions` is int32 (3 + blocks of queries + blocks of keys): the number of tokens of the whole
sequence, the number of all query heads, the index among them of the first one of the call, then
the position of the first token of each block. It is None if a call has all heads of whole
sequences; then a kernel is compiled without code for positions.

A loop reads the position of a block one step ahead, like the index of the block: a load that waits
for another load could not be pipelined.
"""

import triton
import triton.language as tl


@triton.jit
def whole_length(positions, length):
    """The number of tokens of the whole sequence; `length` is that of the call."""
    return length if positions is None else tl.load(positions)


@triton.jit
def whole_head(positions, head):
    """The index among all heads of a head of the call."""
    whole = head
    if positions is not None:
        whole = head + tl.load(positions + 2)
    return whole


@triton.jit
def whole_bh(positions, batch, head, heads):
    """The index among all heads of all batch elements of a head of the call, which has `heads`."""
    whole = batch * heads + head
    if positions is not None:
        whole = batch * tl.load(positions + 1) + whole_head(positions, head)
    return whole


@triton.jit
def of_query_blocks(positions):
    """Pointer to the positions of the blocks of queries, or None."""
    of_blocks = positions
    if positions is not None:
        of_blocks = positions + 3
    return of_blocks


@triton.jit
def of_key_blocks(positions, q_len, BLOCK_Q: tl.constexpr):
    """Pointer to the positions of the blocks of keys, or None."""
    of_blocks = positions
    if positions is not None:
        of_blocks = positions + (3 + tl.cdiv(q_len, BLOCK_Q))
    return of_blocks


@triton.jit
def offset_of(of_blocks, block, BLOCK: tl.constexpr):
    """The position of a block in the whole sequence minus its position in the call, in tokens."""
    offset = 0
    if of_blocks is not None:
        offset = tl.load(of_blocks + block) - block * BLOCK
    return offset
