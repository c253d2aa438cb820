"""Positions of tokens in a sequence of which a call has only some blocks.

`positions` is int32 (1 + blocks of queries + blocks of keys): the number of tokens of the whole
sequence, then the position of the first token of each block. It is None if a call has whole
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
def of_query_blocks(positions):
    """Pointer to the positions of the blocks of queries, or None."""
    of_blocks = positions
    if positions is not None:
        of_blocks = positions + 1
    return of_blocks


@triton.jit
def of_key_blocks(positions, q_len, BLOCK_Q: tl.constexpr):
    """Pointer to the positions of the blocks of keys, or None."""
    of_blocks = positions
    if positions is not None:
        of_blocks = positions + (1 + tl.cdiv(q_len, BLOCK_Q))
    return of_blocks


@triton.jit
def offset_of(of_blocks, block, BLOCK: tl.constexpr):
    """The position of a block in the whole sequence minus its position in the call, in tokens."""
    offset = 0
    if of_blocks is not None:
        offset = tl.load(of_blocks + block) - block * BLOCK
    return offset
