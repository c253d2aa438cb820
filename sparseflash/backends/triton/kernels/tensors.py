"""Tiles of tensors (batch, heads, tokens, dims) of any strides: loads, stores, TMA descriptors."""

from typing import NamedTuple

import triton
import triton.language as tl


class Head(NamedTuple):
    """One head of a tensor: pointer to its token 0, strides in elements."""

    start: tl.tensor
    token_stride: tl.tensor
    dim_stride: tl.tensor


class Stream(NamedTuple):
    """One head of a tensor that a loop reads tile by tile.

    descriptor: the tensor map of the whole tensor; None if the loop loads by pointers
    batch, head_index: indices of the head in the tensor
    """

    head: Head
    descriptor: tl.tensor
    batch: tl.tensor
    head_index: tl.tensor


@triton.jit
def one_head(tensor, strides, batch, head, ALIGN: tl.constexpr, INDEX: tl.constexpr):
    """One head of a tensor; all strides but the last are in units of ALIGN elements."""
    batch_stride, head_stride, token_stride, dim_stride = strides
    offset = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return Head(tensor + offset * ALIGN, token_stride.to(INDEX) * ALIGN, dim_stride)


@triton.jit
def tile_pointers(head, token, ROWS: tl.constexpr, DIMS: tl.constexpr):
    """Pointers (ROWS, DIMS) to the tokens from `token` on."""
    rows = tl.arange(0, ROWS)[:, None] * head.token_stride
    dims = tl.arange(0, DIMS)[None, :].to(head.token_stride.dtype) * head.dim_stride
    return head.start + token.to(tl.int64) * head.token_stride + (rows + dims)


@triton.jit
def load_rows(head, token, limit, shape, ROWS: tl.constexpr, BOUNDED: tl.constexpr):
    """A tile (ROWS, DIMS) from `token` on; zero past HEAD_DIM and, if BOUNDED, past `limit`."""
    pointers = tile_pointers(head, token, ROWS, shape.DIMS)
    in_sequence = token + tl.arange(0, ROWS)[:, None] < limit
    in_head = tl.arange(0, shape.DIMS)[None, :] < shape.HEAD_DIM
    if BOUNDED and shape.HEAD_DIM < shape.DIMS:
        tile = tl.load(pointers, mask=in_sequence & in_head, other=0.0)
    elif BOUNDED:
        tile = tl.load(pointers, mask=in_sequence, other=0.0)
    elif shape.HEAD_DIM < shape.DIMS:
        tile = tl.load(pointers, mask=in_head, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def stream_rows(
    stream, token, limit, shape, ROWS: tl.constexpr, BOUNDED: tl.constexpr, CLIPPED: tl.constexpr
):
    """load_rows in a loop: by TMA if there is a descriptor.

    TMA fills a tile with zeros past the sequence and past HEAD_DIM. With CLIPPED, `limit` may be
    before the end of the sequence.
    """
    if stream.descriptor is None or CLIPPED:
        tile = load_rows(stream.head, token, limit, shape, ROWS, BOUNDED)
    else:
        tile = stream.descriptor.load([stream.batch, stream.head_index, token, 0])
        tile = tl.reshape(tile, (ROWS, shape.DIMS))
    return tile


@triton.jit
def store_rows(head, tile, token, limit, HEAD_DIM: tl.constexpr):
    """Writes the part below `limit` of a tile (ROWS, DIMS) that starts at `token`."""
    in_sequence = token + tl.arange(0, tile.shape[0])[:, None] < limit
    in_head = tl.arange(0, tile.shape[1])[None, :] < HEAD_DIM
    pointers = tile_pointers(head, token, tile.shape[0], tile.shape[1])
    tl.store(pointers, tile.to(head.start.dtype.element_ty), mask=in_sequence & in_head)
