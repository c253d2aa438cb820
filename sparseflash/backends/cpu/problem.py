"""A batch of attention problems of equal shape, cut from one call."""

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from sparseflash.backends.cpu.plan import (
    CACHED_PAIRS,
    CHUNK_FLOATS,
    Chunk,
    StridedBlocks,
    chunks,
    rows_of_block,
)
from sparseflash.backends.cpu.workspace import workspace
from sparseflash.dispatch.call import Call
from sparseflash.dropout import GROUP, keep_mask_of_spans
from sparseflash.score import find_score_function

LOG2E = math.log2(math.e)
# (256, 8): for each byte of a bit tile the mask of its eight keys, 0 or -inf, added to the scores.
_BYTES, _BITS = (torch.arange(n, device="cpu") for n in (256, 8))
_BIT_SET = (_BYTES.unsqueeze(1) >> _BITS) % 2 == 1
_BYTE_MASK = torch.where(_BIT_SET, 0.0, -math.inf)


class Problem:
    """One chunk of a call: `problems` independent problems of `queries` x `keys` tokens.

    A problem has merged * bq queries and count * bk keys. Long rows of scores are divided into
    segments of `width` keys. Tensors over keys are (problems * segments, ..., width), and tensors
    over queries alone (problems, queries, ...). `part` is a slice of the queries. Tensors named
    `blocks` are whole sequences, (batch * heads * blocks, block, head_dim).
    """

    def __init__(self, chunk: Chunk, call: Call):
        table, self._spec, self._bias = call.table, call.spec, call.bias
        self._chunk, self._seed, self._positions = chunk, call.seed, call.positions
        self._score_tensors = () if call.score_tensors is None else call.score_tensors.tensors
        self._block_q, self._block_k = rows_of_block(table, call.spec), table.block_size[1]
        self._rows, self._columns = table.by_query.num_rows, table.by_key.num_rows
        self._problems, key_blocks = chunk.key_blocks.shape
        self._keys = key_blocks * self._block_k
        self._width = chunk.width
        self._tile_mask = self._mask_of_tiles(table.bit_tiles)
        self._padding_mask = (
            None if call.key_lengths is None else self._mask_of_padding(call.key_lengths)
        )

    def queries_of(self, blocks: Tensor) -> Tensor:
        """The queries of the chunk: (problems, queries, head_dim), a view if possible."""
        view = _view(blocks, self._chunk.strided_queries)
        if view is not None:
            return view
        chunk_blocks = blocks.index_select(0, self._chunk.query_blocks.flatten())
        return chunk_blocks.view(self._problems, -1, blocks.shape[2])

    def keys_of(self, name: str, blocks: Tensor) -> Tensor:
        """The keys of the chunk: (problems * segments, width, head_dim), read-only.

        A view if possible, else a copy in the workspace under `name`.
        """
        view = _view(blocks, self._chunk.strided_keys)
        if view is not None:
            return view
        numbers = self._chunk.key_blocks.flatten()
        chunk_blocks = workspace.take(name, (len(numbers), *blocks.shape[1:]), blocks.dtype)
        torch.index_select(blocks, 0, numbers, out=chunk_blocks)
        return chunk_blocks.view(-1, self._width, blocks.shape[2])

    def results_of_queries(self, name: str, blocks: Tensor) -> Tensor:
        """Memory for results of the queries: (problems, queries, n), with undefined contents.

        A view of the contiguous `blocks` if possible, else in the workspace under `name`; then
        write_queries copies it to them.
        """
        view = _view(blocks, self._chunk.strided_queries)
        if view is not None:
            return view
        shape = (*self._chunk.query_blocks.shape, *blocks.shape[1:])
        return workspace.take(name, shape, blocks.dtype).flatten(1, 2)

    def write_queries(self, blocks: Tensor, results: Tensor):
        """Writes results_of_queries to `blocks`, if they are elsewhere."""
        if self._chunk.strided_queries is None:
            numbers = self._chunk.query_blocks.flatten()
            blocks.index_copy_(0, numbers, results.view(-1, *blocks.shape[1:]))

    @property
    def adds_to_keys(self) -> bool:
        """Whether sums over keys are added in place, because the keys are consecutive.

        Products that are added to other views would be computed one by one.
        """
        strided = self._chunk.strided_keys
        return strided is not None and strided.step == strided.count

    def sums_of_keys(self, name: str, blocks: Tensor) -> Tensor:
        """Memory for sums over the keys of the chunk: (problems * segments, width, head_dim).

        A view of the contiguous `blocks` if sums are added in place, else memory with undefined
        contents in the workspace under `name`.
        """
        if self.adds_to_keys:
            return cast(Tensor, _view(blocks, self._chunk.strided_keys))
        shape = (self._problems * self._keys // self._width, self._width)
        return workspace.take(name, (*shape, blocks.shape[2]), blocks.dtype)

    def add_keys(self, blocks: Tensor, sums: Tensor):
        """Adds sums_of_keys to `blocks`, if they are elsewhere."""
        strided = self._chunk.strided_keys
        if strided is None or strided.step < strided.count:  # problems share keys
            numbers = self._chunk.key_blocks.flatten()
            blocks.index_add_(0, numbers, sums.view(-1, *blocks.shape[1:]))
        elif not self.adds_to_keys:
            cast(Tensor, _view(blocks, strided)).add_(sums)

    def add_block_sums(self, totals: Tensor, pairs: Tensor, part: slice):
        """Adds the sum over each block of `pairs` to `totals`.

        Args:
            totals: (batch, heads, nq, nk).
            pairs: (problems * segments, part, width).
            part: The queries of `pairs`.
        """
        by_key_block = self.by_problem(pairs).transpose(1, 2).flatten(2)
        by_key_block = by_key_block.unflatten(2, (-1, self._block_k)).sum(-1)
        row = self._chunk.query_blocks.repeat_interleave(self._block_q, 1)[:, part].unsqueeze(2)
        column = (self._chunk.key_blocks % self._columns).unsqueeze(1)
        index = (row * self._columns + column).flatten()
        totals.view(-1).index_add_(0, index, by_key_block.flatten())

    def max_of_rows(self, x: Tensor) -> Tensor:
        """The row max: (problems * segments, part, width) -> (problems, part, 1)."""
        row_max = x.amax(-1, keepdim=True)
        return row_max if self._keys == self._width else self.by_problem(row_max).amax(1)

    def sum_of_segments(self, x: Tensor) -> Tensor:
        """The sum over segments: (problems * segments, part, n) -> (problems, part, n)."""
        return x if self._keys == self._width else self.by_problem(x).sum(1)

    def multiply(
        self, a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None
    ) -> Tensor:
        """alpha a b, summed over segments: (problems, part, n), in the workspace or in `out`."""
        if self._keys != self._width:
            products = self.by_problem(self.product("product", a, b, alpha))
            return products.sum(1) if out is None else torch.sum(products, 1, out=out)
        # torch computes products one by one if they are written to memory that is not contiguous.
        if out is not None and out.is_contiguous():
            return out.baddbmm_(a, b, beta=0, alpha=alpha)
        product = self.product("product", a, b, alpha)
        return product if out is None else out.copy_(product)

    @property
    def parts(self) -> list[slice]:
        """Slices of the queries, usually one; see Chunk."""
        return self._chunk.parts

    def to_segments(self, x: Tensor) -> Tensor:
        """Repeats for every segment: (problems, part, n) -> (problems * segments, part, n)."""
        segments = self._keys // self._width
        if segments == 1:
            return x
        return x.unsqueeze(1).expand(-1, segments, -1, -1).reshape(-1, *x.shape[1:])

    def by_problem(self, x: Tensor) -> Tensor:
        """(problems * segments, part, n) -> (problems, segments, part, n)."""
        return x.view(-1, self._keys // self._width, *x.shape[1:])

    def product(self, name: str, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
        """alpha * a b, in the workspace under `name`."""
        result = workspace.take(name, (a.shape[0], a.shape[1], b.shape[2]), a.dtype)
        return torch.baddbmm(result, a, b, beta=0, alpha=alpha, out=result)

    def scores(
        self,
        part: slice,
        query: Tensor,
        key: Tensor,
        with_derivative: bool = False,
        with_reads: bool = False,
    ) -> tuple[Tensor, Tensor | float | None, list[tuple[int, Tensor, Tensor]]]:
        """(scores, derivative, reads), the first two (problems * segments, part, width).

        scores = log2(e) * (score(softcap(scale * Q K^T)) + bias), -inf where masked.

        Args:
            part: Slice of the queries.
            query: The queries of `part`, repeated for every segment.
            key: The keys of the chunk.
            with_derivative: Whether to compute the derivative of score function and soft cap. It
                is None if it is 1 or not computed.
            with_reads: Whether to compute the derivatives by score tensors; see
                score.ReadDerivatives.
        """
        cap = self._spec.softcap
        factor = self._spec.scale * (1 / cap if cap else LOG2E)
        scores, derivative = self.product("scores", query, key.mT, factor), None
        reads = []
        if cap:
            # 1 - tanh^2, without cancellation near the cap.
            derivative = scores.cosh().pow_(-2) if with_derivative else None
            scores.tanh_().mul_(cap * LOG2E)
        if self._spec.score is not None:
            function = find_score_function(self._spec.score)
            batch, head, query, key = self._pairs(part)
            if self._positions is not None:
                head = head + self._positions.first_head
            arguments = (batch, head, query, key, *self._score_tensors)
            capped = scores / LOG2E
            if with_reads and function.reads is not None:
                reads = function.reads.torch(capped, *arguments)
            f, score_derivative = function.evaluate(capped, *arguments)
            scores.copy_(f).mul_(LOG2E)
            derivative = score_derivative if derivative is None else derivative * score_derivative
        if self._bias is not None:
            scores.add_(self._bias.flatten()[self.bias_index(self._bias, part)], alpha=LOG2E)
        if self._tile_mask is not None:
            self._add_tile_mask(scores, self._tile_mask, part)
        if self._padding_mask is not None:
            scores.add_(self._padding_mask)
        return scores, derivative, reads

    def bias_index(self, bias: Tensor, part: slice) -> Tensor:
        """The index of each pair in the flattened bias: int64, in the shape of scores."""
        distances = bias.shape[1]
        queries = self._spec.q_len if self._positions is None else self._positions.seq_len
        _, head, query, key = self._pairs(part)
        # Pairs outside the sequence are masked; their index must be valid.
        index = (key - query + queries - 1).clamp_(0, distances - 1)
        if len(bias) > 1:
            index += head * distances
        return index

    def _pairs(self, part: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Batch element, head of the call, query and key of each score: int64, they broadcast."""
        query, key = self._query_positions()[:, part], self._key_positions()
        bh = self.to_segments(self._chunk.bh.view(-1, 1, 1))
        batch, head = bh // self._spec.heads, bh % self._spec.heads
        return batch, head, self.to_segments(query.unsqueeze(2)), key.view(-1, 1, self._width)

    def _query_positions(self) -> Tensor:
        """The position of each query in the whole sequence: int64 (problems, queries)."""
        first = None if self._positions is None else self._positions.query
        return _tokens(self._chunk.query_blocks % self._rows, self._block_q, first)

    def _key_positions(self) -> Tensor:
        """The position of each key in the whole sequence: int64 (problems, keys)."""
        first = None if self._positions is None else self._positions.key
        return _tokens(self._chunk.key_blocks % self._columns, self._block_k, first)

    def dropout_keep_mask(self, part: slice) -> Tensor | None:
        """The pairs that dropout keeps: bool, in the shape of scores; None without dropout."""
        if self._spec.dropout_p == 0:
            return None
        span = min(self._block_k, GROUP)
        query, first_keys = self._query_positions()[:, part], self._key_positions()[:, ::span]
        bh = self._chunk.bh
        if self._positions is not None:  # which number all heads
            batch, head = bh // self._spec.heads, bh % self._spec.heads
            bh = batch * self._positions.heads + self._positions.first_head + head
        return keep_mask_of_spans(
            self._seed,
            self.to_segments(bh.view(-1, 1, 1)),
            self.to_segments(query.unsqueeze(2)),
            first_keys.view(-1, 1, self._width // span),
            span,
            self._spec.dropout_p,
        )

    def _add_tile_mask(self, scores: Tensor, tile_mask: Tensor, part: slice):
        if tile_mask.shape == scores.shape:
            scores.add_(tile_mask)
            return
        # Merged rows share their tiles. A part is made of whole rows or lies within one.
        first_query = part.start % self._block_q
        mask = tile_mask[:, first_query : first_query + part.stop - part.start]
        by_row = self.by_problem(scores).unflatten(2, (-1, mask.shape[1]))
        first_key = self._keys - mask.shape[2]
        for start in range(first_key - first_key % self._width, self._keys, self._width):
            masked = slice(max(start, first_key), start + self._width)
            segment = by_row[:, start // self._width, ..., masked.start - start :]
            segment_mask = mask[..., masked.start - first_key : masked.stop - first_key]
            segment.add_(segment_mask.unsqueeze(1))

    def _mask_of_tiles(self, bit_tiles: Tensor) -> Tensor | None:
        """Element masks of the last keys of each problem: (problems, bq, partial * bk) or None."""
        chunk, spec = self._chunk, self._spec
        if not chunk.tiles.numel():
            return None
        if spec.batch * spec.heads * spec.q_len * spec.k_len > CACHED_PAIRS:
            return self._read_tiles(bit_tiles)
        if "tile mask" not in chunk.cache:
            chunk.cache["tile mask"] = self._read_tiles(bit_tiles)
        return chunk.cache["tile mask"]

    def _read_tiles(self, bit_tiles: Tensor) -> Tensor:
        in_bytes = bit_tiles.view(torch.uint8)[:, : self._block_q, : self._block_k // 8]
        tiles = in_bytes.index_select(0, self._chunk.tiles.flatten())
        by_query = tiles.unflatten(0, self._chunk.tiles.shape).transpose(1, 2)
        mask = _BYTE_MASK.index_select(0, by_query.flatten().int())
        return mask.view(self._problems, self._block_q, -1)

    def _mask_of_padding(self, key_lengths: Tensor) -> Tensor:
        """0, or -inf at padded keys: (problems * segments, 1, width)."""
        length = key_lengths[self._chunk.bh // self._spec.heads].unsqueeze(1)
        padded = _tokens(self._chunk.key_blocks % self._columns, self._block_k) >= length
        return torch.where(padded, -math.inf, 0.0).view(-1, 1, self._width)


def problems(call: Call) -> Iterator[Problem]:
    """Yields all problems of a call, with each non-empty block row of each head once.

    They share memory: a problem is valid until the next one is yielded.
    """
    try:
        for chunk in chunks(call.plan):
            yield Problem(chunk, call)
    finally:
        workspace.trim(CHUNK_FLOATS)


def _view(blocks: Tensor, strided: StridedBlocks | None) -> Tensor | None:
    """A view (problems, tokens, n) of blocks; None if they are not strided or not in one view."""
    if strided is None:
        return None
    _, size, width = blocks.shape
    if strided.whole and size == strided.tokens:
        return blocks
    block_stride, row_stride, column_stride = blocks.stride()
    if strided.count > 1 and block_stride != size * row_stride:
        return None
    strides = (strided.step * block_stride, row_stride, column_stride)
    offset = blocks.storage_offset() + strided.first * block_stride
    return blocks.as_strided((strided.problems, strided.tokens, width), strides, offset)


def _tokens(blocks: Tensor, size: int, first: Tensor | None = None) -> Tensor:
    """The tokens of blocks: (problems, n) -> (problems, n * size).

    Args:
        blocks: Indices of blocks.
        size: Tokens of a block.
        first: The first token of each block, if blocks do not follow one another.
    """
    begin = blocks * size if first is None else first[blocks]
    return (begin.unsqueeze(-1) + torch.arange(size, device="cpu")).flatten(1)
