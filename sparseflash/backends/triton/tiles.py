"""Device functions of all kernels: a program's tile, its lists, rows, masks and dropout."""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SCAN_WIDTH = tl.constexpr(256)


class Table(NamedTuple):
    """One direction of a masks.LookupTable."""

    row_ptr: tl.tensor
    full_index: tl.tensor
    partial_index: tl.tensor
    partial_bit_tile: tl.tensor
    schedule: tl.tensor
    bit_tiles: tl.tensor
    head_to_mask: tl.tensor


class Sizes(NamedTuple):
    """Run-time integers.

    rows: block rows of a mask in the direction of the kernel
    use_schedule: 1 if programs take the rows in the table's order, 0 if all rows are equally long
    longest_first: 1 if the longest rows of all heads start before any shorter row, 0 if the heads
        follow one another
    mask_batch_stride, mask_head_stride: of the table's head_to_mask, 0 where one entry serves all
    """

    heads: tl.tensor
    q_len: tl.tensor
    k_len: tl.tensor
    num_masks: tl.tensor
    rows: tl.tensor
    use_schedule: tl.tensor
    longest_first: tl.tensor
    mask_batch_stride: tl.tensor
    mask_head_stride: tl.tensor


class Head(NamedTuple):
    """One head of a tensor: pointer to its token 0, strides in elements."""

    start: tl.tensor
    token_stride: tl.tensor
    dim_stride: tl.tensor


def unspecialized(*tensors: str) -> dict[str, list[str]]:
    """Arguments of triton.jit for a kernel with these strided tensors, a table and sizes.

    Triton would compile a kernel anew whenever an integer turns to 1 or gains or loses a factor
    of 16, or a pointer its alignment. Only a dim stride keeps its specialisation on 1: wide loads
    need it. Tuples would lose these settings, so kernels take flat parameters.
    """
    strides = [f"{tensor}_{axis}" for tensor in tensors for axis in ("batch", "head", "token")]
    dim_strides = [f"{tensor}_dim" for tensor in tensors]
    return {
        "do_not_specialize": [*strides, *Sizes._fields, "bias_head", "batches", "splits"],
        "do_not_specialize_on_alignment": [
            *dim_strides,
            *Table._fields,
            "key_lengths",
            "lse",
            "grad_lse",
            "bias",
        ],
    }


@triton.jit
def work_tile(sizes, PARTS: tl.constexpr):
    """(rank of the block row, part of that row, batch index, head) of this program."""
    first, second, third = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile = tl.where(sizes.longest_first != 0, third, first)
    head = tl.where(sizes.longest_first != 0, first, second)
    batch = tl.where(sizes.longest_first != 0, second, third)
    return tile // PARTS, tile % PARTS, batch, head


@triton.jit
def mask_of_head(table, sizes, batch, head):
    """The index of the mask that a query head reads."""
    mask_index = 0
    if sizes.num_masks > 1:
        mask_index = tl.load(
            table.head_to_mask + batch * sizes.mask_batch_stride + head * sizes.mask_head_stride
        )
    return mask_index


@triton.jit
def scheduled_row(table, sizes, mask_index, rank):
    """The block row at position `rank` in the schedule of a mask."""
    row = rank
    if sizes.use_schedule:
        row = tl.load(table.schedule + mask_index * sizes.rows + rank)
    return row


@triton.jit
def lists_of_row(table, sizes, mask_index, row):
    """(full_start, full_count, partial_start, partial_count) of a block row."""
    entry = table.row_ptr + (mask_index * sizes.rows + row) * 4
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def key_block_lists(
    table, sizes, mask_index, row, length,
    BLOCK_K: tl.constexpr, BN: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """(start, count) of each list that a row of queries walks:

    0. partial blocks; 1. full blocks that end before `length`; 2. the full block that it cuts.
    Where a tile holds several blocks the second list is of all full ones, for a loop with masks:
    the last tile of a row may not be full, and a loop of its own would wait for memory once more.
    """
    full_start, full_count, partial_start, partial_count = lists_of_row(
        table, sizes, mask_index, row
    )
    inside = full_count
    clipped = 0
    if LENGTHS:
        end = tl.cdiv(length, BLOCK_K)
        inside = count_below(table.full_index, full_start, full_count, length // BLOCK_K)
        clipped = count_below(table.full_index, full_start, full_count, end) - inside
        partial_count = count_below(table.partial_index, partial_start, partial_count, end)
    if BN > BLOCK_K:
        inside += clipped
    return (partial_start, full_start, full_start + inside), (partial_count, inside, clipped)


@triton.jit
def first_blocks(table, starts, counts, length, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """listed_block of the first step over each list: of partial blocks, then of full ones."""
    partial_start, full_start, clipped_start = starts
    partial_count, full_count, clipped_count = counts
    return (
        listed_block(table.partial_index, partial_start, partial_count, 0, length, BLOCK, ROWS),
        listed_block(table.full_index, full_start, full_count, 0, length, BLOCK, ROWS),
        listed_block(table.full_index, clipped_start, clipped_count, 0, length, BLOCK, ROWS),
    )


@triton.jit
def steps(count, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """How many tiles of ROWS tokens `count` blocks take: parts of a block, or several blocks."""
    return tl.cdiv(count, ROWS // BLOCK) if ROWS > BLOCK else count * (BLOCK // ROWS)


@triton.jit
def listed_block(index, start, count, step, length, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The block that a step reads; where a tile holds several, that of each of its ROWS tokens.

    Those after the last block get the one after a sequence of `length` tokens.
    """
    if ROWS > BLOCK:
        entry = step * (ROWS // BLOCK) + tl.arange(0, ROWS) // BLOCK
        past = tl.cdiv(length, BLOCK)
        block = tl.load(index + (start + entry), mask=entry < count, other=past)
    else:
        block = tl.load(index + (start + step // (BLOCK // ROWS)))
    return block


@triton.jit
def listed_bit_tile(table, start, count, step, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The bit tile of the block that a step reads; of each block where a tile holds several."""
    if ROWS > BLOCK:
        entry = step * (ROWS // BLOCK) + tl.arange(0, ROWS // BLOCK)
        tile = tl.load(table.partial_bit_tile + (start + entry), mask=entry < count, other=0)
    else:
        tile = tl.load(table.partial_bit_tile + (start + step // (BLOCK // ROWS)))
    return tile


@triton.jit
def tile_start(block, step, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The first token of the tile of a step; all its tokens where it holds several blocks."""
    if ROWS > BLOCK:
        start = block * BLOCK + tl.arange(0, ROWS) % BLOCK
    else:
        start = block * BLOCK + step % (BLOCK // ROWS) * ROWS
    return start


@triton.jit
def tokens_from(start, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """All tokens of a tile that begins at `start`, which if PACKED holds them already."""
    return start if PACKED else start + tl.arange(0, ROWS)


@triton.jit
def count_below(index, start, count, limit):
    """How many of the ascending entries index[start : start + count] are below `limit`.

    They are counted, SCAN_WIDTH at a time: a search would wait for memory at each of its steps.
    """
    below = 0
    for first in range(0, count, SCAN_WIDTH):
        entry = first + tl.arange(0, SCAN_WIDTH)
        found = tl.load(index + start + entry, mask=entry < count, other=limit)
        below += tl.sum((found < limit).to(tl.int32), 0)
    return below


@triton.jit
def one_head(tensor, strides, batch, head, ALIGN: tl.constexpr, INDEX: tl.constexpr):
    """One head of a tensor whose strides, but for the last, come in units of ALIGN elements."""
    batch_stride, head_stride, token_stride, dim_stride = strides
    offset = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return Head(tensor + offset * ALIGN, token_stride.to(INDEX) * ALIGN, dim_stride)


@triton.jit
def tile_pointers(head, token, ROWS: tl.constexpr, DIMS: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None] * head.token_stride
    dims = tl.arange(0, DIMS)[None, :].to(head.token_stride.dtype) * head.dim_stride
    return head.start + token.to(tl.int64) * head.token_stride + (rows + dims)


@triton.jit
def load_rows(
    head,
    token,
    limit,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """A (ROWS, DIMS) tile from `token` on; zero past HEAD_DIM and, if BOUNDED, past `limit`."""
    pointers = tile_pointers(head, token, ROWS, DIMS)
    in_sequence = token + tl.arange(0, ROWS)[:, None] < limit
    return load_tile(pointers, in_sequence, DIMS, HEAD_DIM, BOUNDED)


@triton.jit
def gather_rows(
    head, tokens, limit, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr, BOUNDED: tl.constexpr
):
    """load_rows of `tokens`, whichever they are."""
    rows = tokens.to(tl.int64)[:, None] * head.token_stride
    dims = tl.arange(0, DIMS)[None, :].to(head.token_stride.dtype) * head.dim_stride
    return load_tile(head.start + (rows + dims), tokens[:, None] < limit, DIMS, HEAD_DIM, BOUNDED)


@triton.jit
def load_tile(
    pointers, in_sequence, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr, BOUNDED: tl.constexpr
):
    in_head = tl.arange(0, DIMS)[None, :] < HEAD_DIM
    if BOUNDED and HEAD_DIM < DIMS:
        tile = tl.load(pointers, mask=in_sequence & in_head, other=0.0)
    elif BOUNDED:
        tile = tl.load(pointers, mask=in_sequence, other=0.0)
    elif HEAD_DIM < DIMS:
        tile = tl.load(pointers, mask=in_head, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def stream_rows(
    descriptor, batch, head_index, head, token, limit,
    ROWS: tl.constexpr, DIMS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BOUNDED: tl.constexpr, CLIPPED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """load_rows for a loop: by the tensor memory accelerator if there is a descriptor.

    The accelerator zero-fills past the sequence and past HEAD_DIM. CLIPPED says that `limit` may
    come before the end of the sequence. PACKED says that `token` holds the tokens of several
    blocks.
    """
    if PACKED:
        tile = gather_rows(head, token, limit, DIMS, HEAD_DIM, BOUNDED)
    elif descriptor is None or CLIPPED:
        tile = load_rows(head, token, limit, ROWS, DIMS, HEAD_DIM, BOUNDED)
    else:
        tile = tl.reshape(descriptor.load([batch, head_index, token, 0]), (ROWS, DIMS))
    return tile


@triton.jit
def dot_scores(rows, streamed, PRECISION: tl.constexpr, SWAP_AB: tl.constexpr):
    """The products of the rows of a program with those that it streams; transposed if SWAP_AB, as
    the rows are then.
    """
    if SWAP_AB:
        products = tl.dot(streamed, rows, input_precision=PRECISION)
    else:
        products = tl.dot(rows, tl.trans(streamed), input_precision=PRECISION)
    return products


@triton.jit
def dot_accumulate(acc, weights, streamed, PRECISION: tl.constexpr, SWAP_AB: tl.constexpr):
    """acc + weights streamed; if SWAP_AB acc and weights are transposed."""
    weights = weights.to(streamed.dtype)
    if SWAP_AB:
        acc = tl.dot(tl.trans(streamed), weights, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(weights, streamed, acc, input_precision=PRECISION)
    return acc


@triton.jit
def zero_sums(ROWS: tl.constexpr, DIMS: tl.constexpr, SWAP_AB: tl.constexpr):
    """What add_weighted starts from."""
    return tl.zeros([DIMS, ROWS] if SWAP_AB else [ROWS, DIMS], tl.float32)


@triton.jit
def transposed_if(tile, SWAP_AB: tl.constexpr):
    """The tile, if SWAP_AB transposed: rows for score_products, and sums of add_weighted."""
    return tl.trans(tile) if SWAP_AB else tile


@triton.jit
def store_rows(head, tile, token, limit, HEAD_DIM: tl.constexpr):
    """Writes the part below `limit` of a tile that starts at `token`."""
    in_sequence = token + tl.arange(0, tile.shape[0])[:, None] < limit
    in_head = tl.arange(0, tile.shape[1])[None, :] < HEAD_DIM
    pointers = tile_pointers(head, token, tile.shape[0], tile.shape[1])
    tl.store(pointers, tile.to(head.start.dtype.element_ty), mask=in_sequence & in_head)


@triton.jit
def element_mask(
    bit_tiles, tile, tokens, key_start,
    BN: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Element mask (BM, BN), or its transpose, of the queries `tokens` and keys from key_start on.

    tile: that of the block, for all queries or for each; where the keys are of several blocks,
        that of each block
    """
    if BN > BLOCK_K:
        mask = element_mask_of_blocks(bit_tiles, tile, tokens, BN, BLOCK_Q, BLOCK_K, TRANSPOSED)
    else:
        mask = element_mask_of_block(
            bit_tiles, tile, tokens, key_start, BN, BLOCK_Q, BLOCK_K, TRANSPOSED
        )
    return mask


@triton.jit
def element_mask_of_block(
    bit_tiles, tile, tokens, key_start,
    BN: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """element_mask, of keys of one block.

    A query's bits are read word by word: a tile of pointers would be pipelined through shared
    memory.
    """
    WORDS: tl.constexpr = (BLOCK_K + 31) // 32
    QUERY_AXIS: tl.constexpr = 1 if TRANSPOSED else 0
    rows = bit_tiles + tile.to(tl.int64) * (BLOCK_Q * WORDS) + tokens % BLOCK_Q * WORDS
    words = rows + key_start % BLOCK_K // 32
    keys = tl.expand_dims(tl.arange(0, BN), QUERY_AXIS)
    word = tl.expand_dims(tl.load(words), 1 - QUERY_AXIS)
    for WORD in tl.static_range(1, BN // 32):
        word = tl.where(
            keys // 32 == WORD, tl.expand_dims(tl.load(words + WORD), 1 - QUERY_AXIS), word
        )
    bit = keys % 32 if BN >= 32 else key_start % BLOCK_K % 32 + keys
    return ((word >> bit) & 1) != 0


@triton.jit
def element_mask_of_blocks(
    bit_tiles, tile, tokens,
    BN: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """element_mask, of BN keys of several blocks with one `tile` each."""
    WORDS: tl.constexpr = (BLOCK_K + 31) // 32
    WIDTH: tl.constexpr = BLOCK_K // WORDS
    QUERY_AXIS: tl.constexpr = 1 if TRANSPOSED else 0
    keys = tl.expand_dims(tl.arange(0, BN), QUERY_AXIS)
    rows = bit_tiles + tokens % BLOCK_Q * WORDS
    word = tl.expand_dims(tl.zeros_like(tokens), 1 - QUERY_AXIS)
    for WORD in tl.static_range(BN // WIDTH):
        own = tl.arange(0, BN // BLOCK_K) == WORD // WORDS
        first = tl.sum(tl.where(own, tile, 0), 0).to(tl.int64) * (BLOCK_Q * WORDS)
        found = tl.load(rows + (first + WORD % WORDS))
        word = tl.where(keys // WIDTH == WORD, tl.expand_dims(found, 1 - QUERY_AXIS), word)
    return ((word >> keys % WIDTH) & 1) != 0


@triton.jit
def bias_of_head(bias, bias_head, head):
    """The biases of one head, or of a column of heads, if there are any."""
    row = bias
    if bias is not None:
        row = bias + head.to(tl.int64) * bias_head
    return row


@triton.jit
def apply_score_mod(
    products, batch, head, cap, biases, tokens, keys, q_len, k_len, scale2,
    SOFTCAP: tl.constexpr, SCORE: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(scores in base 2, the derivative of score and softcap) of the products Q K^T of a tile,
    the queries `tokens` with `keys`; head: one or a column of them.

    scores = log2(e) * (score(softcap(scale * products)) + bias)
    """
    QUERY_AXIS: tl.constexpr = 1 if TRANSPOSED else 0
    queries = tl.expand_dims(tokens, 1 - QUERY_AXIS)
    keys = tl.expand_dims(keys, QUERY_AXIS)
    slopes = 1.0
    if SOFTCAP:
        capped, slopes = tanh(products * (scale2 * LN2 / cap))
        scores = capped * (cap * LOG2E)
    else:
        scores = products * scale2
    if SCORE is not None:
        scores, slope = SCORE(scores * LN2, batch, head, queries, keys)
        scores *= LOG2E
        slopes *= slope
    if biases is not None:
        places = keys - queries + (q_len - 1)
        inside = (places >= 0) & (places < q_len + k_len - 1)
        scores += tl.load(biases + places, mask=inside, other=0.0) * LOG2E
    return scores, slopes


@triton.jit
def tanh(x):
    """(tanh x, its derivative) to a rounding or two: by its series near 0, where it cancels."""
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    near = tl.minimum(size, 0.3)
    square = near * near
    series = -17 / 315 + square * (62 / 2835)
    series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * series))
    value = tl.where(size < 0.3, near * series, far)
    return tl.where(x < 0.0, -value, value), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def dropout_keep_mask(
    seed, threshold, bh, tokens, key_start,
    BM: tl.constexpr, BN: tl.constexpr, PACKED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Dropout's keep mask (BM, BN), or its transpose, of the queries `tokens` and the keys from
    key_start on, or if PACKED of the keys that it holds.

    One Philox call serves four neighbouring keys: (q, k) uses word k % 4 of counter
    (k // 4, q, bh, 0), where bh = batch index * heads + head, one or a column of them.
    """
    if PACKED:
        fours = tl.max(tl.reshape(key_start // 4, (BN // 4, 4)), 1)
    else:
        fours = key_start // 4 + tl.arange(0, BN // 4)
    keys = tl.broadcast_to(fours[None, :], BM, BN // 4)
    queries = tl.broadcast_to(tokens[:, None], BM, BN // 4)
    zero = tl.zeros_like(keys)
    word0, word1, word2, word3 = tl.philox(seed, keys, queries, zero + bh, zero)
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    keep = tl.reshape(words, (BM, BN)) >= threshold.to(tl.uint32)
    return tl.trans(keep) if TRANSPOSED else keep
