"""Device functions of all kernels: rings of buffers, walks over the table."""

from typing import NamedTuple

from sparseflash.backends.hopper.gluon_shim import (
    arrive,
    await_arrivals,
    gather_lanes,
    gl,
    gluon,
    load_tile,
    mbarrier,
    reinterpreted,
)

PART = gl.constexpr(64)  # tokens of a block that a group of four warps owns
THREADS = gl.constexpr(4)  # that share a row of a product
AHEAD = gl.constexpr(4)  # how many rows are announced ahead
FACTS = gl.constexpr(9)  # of a row that is announced:
ROW, BATCH, HEAD, PARTIAL_START, PARTIALS, FULL_START, FULLS, LENGTH, CUTS = map(
    gl.constexpr, range(FACTS.value)
)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NEG_INF = gl.constexpr(float("-inf"))


class Table(NamedTuple):
    """One direction of a masks.LookupTable; the rows of its bank are those of the direction."""

    bounds: gl.tensor
    full_index: gl.tensor
    partial_index: gl.tensor
    partial_tile: gl.tensor
    order: gl.tensor
    bank: gl.tensor
    head_layer: gl.tensor


class Sizes(NamedTuple):
    """Run-time integers.

    heads:    query heads
    rows:     block rows of a layer in the direction of the kernel
    tiles:    block rows of all heads, of queries or of keys
    together: heads whose rows are taken together, the heaviest of all of them first
    """

    heads: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    mask_heads: gl.tensor
    rows: gl.tensor
    tiles: gl.tensor
    together: gl.tensor


class Ring(NamedTuple):
    """Buffers in shared memory that one partition fills and others empty, in turn."""

    buffers: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor
    emptied: gl.shared_memory_descriptor


class GroupRing(NamedTuple):
    """A Ring that groups of warps empty, each warp for itself, while at a barrier in shared memory
    the group would gather first.

    first: the number of the first of its barriers in hardware; threads: those that meet there, of
        all groups, of a warp that relays, and of the warp that fills the buffers
    """

    buffers: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor
    first: gl.tensor
    threads: gl.tensor


class Dropout(NamedTuple):
    """All None without dropout.

    seed_low, seed_high: signed words; threshold: less 2^31, so that words compare as signed
    keep_scale:          1 / (1 - dropout_p)
    """

    seed_low: gl.tensor
    seed_high: gl.tensor
    threshold: gl.tensor
    keep_scale: gl.tensor


class Call(NamedTuple):
    """What all partitions of a kernel know of a call.

    block:       tokens along both sides of a block of the mask; a constant as long as the tuple is
        an argument, while an assignment would make it a number of the run
    key_lengths: of the batch elements, or None
    counter:     of tiles that programs have taken, or None
    announced:   the ring by which `produce` announces the rows of this program
    """

    block: gl.constexpr
    table: Table
    sizes: Sizes
    key_lengths: gl.tensor
    counter: gl.tensor
    announced: Ring
    scale2: gl.tensor
    dropout: Dropout


class Walk(NamedTuple):
    """The blocks of one row: partial ones, then the full one that the key length cuts (`cuts` is
    0 or 1), then full ones. length: keys of the batch element.
    """

    length: gl.tensor
    partial_start: gl.tensor
    partials: gl.tensor
    cuts: gl.tensor
    full_start: gl.tensor
    fulls: gl.tensor


def unspecialized(*pointers: str) -> dict[str, list[str]]:
    """Arguments of gluon.jit for a kernel with a table, sizes and more `pointers`.

    It would be compiled anew whenever an integer turns to 1 or gains or loses a factor of 16, or a
    pointer its alignment.
    """
    return {
        "do_not_specialize": [*Sizes._fields, *Dropout._fields],
        "do_not_specialize_on_alignment": [*Table._fields, *pointers],
    }


@gluon.jit
def ring(descriptor, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """STAGES buffers for the tiles of a descriptor, each emptied by CONSUMERS partitions."""
    filled, emptied = barriers(STAGES, 1), barriers(STAGES, CONSUMERS)
    return Ring(tile_buffers(descriptor, STAGES), filled, emptied)


@gluon.jit
def group_ring(descriptor, FIRST: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
               RELAYS: gl.constexpr = 0):  # fmt: skip
    """STAGES buffers for the tiles of a descriptor, emptied by all groups and RELAYS warps. Each
    of them begins with `hand_over`.
    """
    threads: gl.constexpr = 128 * GROUPS + 32 * (1 + RELAYS)
    return GroupRing(tile_buffers(descriptor, STAGES), barriers(STAGES, 1), FIRST, threads)


@gluon.jit
def tile_buffers(descriptor, STAGES: gl.constexpr):
    shape: gl.constexpr = [STAGES] + descriptor.block_type.shape  # noqa: RUF005 (no star in Gluon)
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def row_ring(CONSUMERS: gl.constexpr):
    """A ring of FACTS that `produce` tells all groups of `consume`."""
    buffers = gl.allocate_shared_memory(
        gl.int32, [AHEAD * FACTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    filled, emptied = barriers(AHEAD, 1), barriers(AHEAD, CONSUMERS)
    return Ring(buffers, filled, emptied)


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """One for each buffer of a ring, at which COUNT arrive."""
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(made.index(stage), count=COUNT)
    return made


@gluon.jit
def next_tile(call, tile):
    """The tile of this program after `tile`.

    The first tile of a program is that of its number. Where all rows weigh the same the others
    follow at the distance of the number of programs. Where they do not, there is a counter that
    hands out tiles as programs ask.
    """
    following = tile + gl.num_programs(0)
    if call.counter is not None:
        following = gl.num_programs(0) + gl.atomic_add(call.counter, 1, sem="relaxed")
    return following


@gluon.jit
def announce(call, batch, head, row, walk, stage, phase):
    """Tells all groups of a row and its blocks; (stage, phase) of the next announcement.

    Only `produce` looks them up: it takes several loads one after another, for which groups would
    wait at the beginning of every row.
    """
    begin_announcement(call, stage, phase)
    tell(call, stage, ROW, row)
    tell(call, stage, BATCH, batch)
    tell(call, stage, HEAD, head)
    tell(call, stage, PARTIAL_START, walk.partial_start)
    tell(call, stage, PARTIALS, walk.partials)
    tell(call, stage, FULL_START, walk.full_start)
    tell(call, stage, FULLS, walk.fulls)
    if call.key_lengths is not None:
        tell(call, stage, LENGTH, walk.length)
        tell(call, stage, CUTS, walk.cuts)
    end_announcement(call, stage)
    return advance(stage, phase, AHEAD)


@gluon.jit
def announce_end(call, stage, phase):
    """Tells all groups that no row follows."""
    begin_announcement(call, stage, phase)
    tell(call, stage, ROW, -1)
    end_announcement(call, stage)


@gluon.jit
def begin_announcement(call, stage, phase):
    """Waits until all groups have heard what the buffer held."""
    mbarrier.wait(call.announced.emptied.index(stage), phase)
    gather_lanes(0)


@gluon.jit
def end_announcement(call, stage):
    """Hands what was told to all groups."""
    gather_lanes(0)
    mbarrier.arrive(call.announced.filled.index(stage), count=1)


@gluon.jit
def hear(call, stage, phase):
    """(batch, head, row, walk, stage, phase) of what is announced; row is -1 after the last."""
    filled = call.announced.filled.index(stage)
    # Twice, since racecheck takes no notice of a wait that had to try again.
    mbarrier.wait(filled, phase)
    gather_alone()
    mbarrier.wait(filled, phase)
    gather_alone()
    row, batch, head = told(call, stage, ROW), told(call, stage, BATCH), told(call, stage, HEAD)
    partial_start, partials = told(call, stage, PARTIAL_START), told(call, stage, PARTIALS)
    full_start, fulls = told(call, stage, FULL_START), told(call, stage, FULLS)
    length, cuts = call.sizes.k_len, fulls * 0
    if call.key_lengths is not None:
        length, cuts = told(call, stage, LENGTH), told(call, stage, CUTS)
    gather_alone()
    release(call.announced, stage)
    stage, phase = advance(stage, phase, AHEAD)
    walk = Walk(length, partial_start, partials, cuts, full_start, fulls)
    return batch, head, row, walk, stage, phase


@gluon.jit
def gather_alone():
    """gather_lanes of a warp that hears alone; Triton lets groups gather."""
    if gl.num_warps() == 1:
        gather_lanes(1)


@gluon.jit
def tell(call, stage, FACT: gl.constexpr, number):
    number = gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    call.announced.buffers.index(stage * FACTS + FACT).store(number)


@gluon.jit
def told(call, stage, FACT: gl.constexpr):
    number = call.announced.buffers.index(stage * FACTS + FACT)
    return gl.max(number.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next buffer of a ring, and the parity of its barriers on this lap."""
    stage = stage + 1
    if stage == STAGES:
        stage = 0
        phase = phase ^ 1
    return stage, phase


@gluon.jit
def fill(ring, descriptor, batch, head, token, stage, phase):
    """Loads the tile of a head that starts at `token` as soon as the buffer is empty.

    What lies past the sequence becomes zero.
    """
    mbarrier.wait(ring.emptied.index(stage), phase)
    load(ring, descriptor, batch, head, token, stage)


@gluon.jit
def load(ring, descriptor, batch, head, token, stage):
    """Loads a tile into a buffer that is empty."""
    filled = ring.filled.index(stage)
    mbarrier.expect(filled, descriptor.block_type.nbytes)
    load_tile(descriptor, [batch, head, token, 0], filled, tile_buffer(ring, stage, descriptor))


@gluon.jit
def refill(ring, descriptor, batch, head, token, stage):
    """`fill` of a GroupRing."""
    await_empty(ring, stage)
    load(ring, descriptor, batch, head, token, stage)


@gluon.jit
def skip(ring, stage):
    """Hands on a buffer of a GroupRing as it is as soon as it is empty."""
    await_empty(ring, stage)
    mbarrier.arrive(ring.filled.index(stage), count=1)


@gluon.jit
def await_empty(ring, stage):
    """Waits until all that empty a GroupRing have handed a buffer back."""
    await_arrivals(ring.first + stage, ring.threads)


@gluon.jit
def hand_over(ring):
    """Begins a GroupRing: all of its buffers are empty."""
    STAGES: gl.constexpr = ring.buffers.shape[0]
    for stage in gl.static_range(STAGES):
        leave(ring, stage)


@gluon.jit
def leave(ring, stage):
    """`release` of a GroupRing."""
    arrive(ring.first + stage, ring.threads)


@gluon.jit
def tile_buffer(ring, stage, descriptor):
    """A buffer as one for tiles of the descriptor: its beginning if they are smaller."""
    shape: gl.constexpr = descriptor.block_type.shape
    buffer = ring.buffers.index(stage)
    return reinterpreted(buffer, descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def matrix(ring, stage):
    """A buffer as a matrix (tokens, dims)."""
    return as_matrix(ring.buffers.index(stage))


@gluon.jit
def as_matrix(buffer):
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def load_keys(keys, values, key_ring, value_ring, call, batch, kv_head, walk, stage, phase,
              STAGES: gl.constexpr):  # fmt: skip
    """Loads the keys and values of all blocks of a row of queries, in the order of the walk."""
    table = call.table
    stage, phase = load_blocks(
        keys, values, key_ring, value_ring, call, batch, kv_head,
        table.partial_index, walk.partial_start, walk.partials, stage, phase, STAGES,
    )  # fmt: skip
    if call.key_lengths is not None:
        stage, phase = load_blocks(
            keys, values, key_ring, value_ring, call, batch, kv_head,
            table.full_index, walk.full_start + walk.fulls, walk.cuts, stage, phase, STAGES,
        )  # fmt: skip
    return load_blocks(
        keys, values, key_ring, value_ring, call, batch, kv_head,
        table.full_index, walk.full_start, walk.fulls, stage, phase, STAGES,
    )  # fmt: skip


@gluon.jit
def load_blocks(keys, values, key_ring, value_ring, call, batch, head, index, start, count,
                stage, phase, STAGES: gl.constexpr):  # fmt: skip
    """Loads the keys and values of listed blocks; the index is read one block ahead."""
    COLUMNS: gl.constexpr = keys.block_type.shape[2]
    block = gl.load(index + start)
    for i in range(start, start + count):
        ahead = gl.load(index + i + 1)
        for part in gl.static_range(call.block // COLUMNS):
            token = block * call.block + part * COLUMNS
            refill(key_ring, keys, batch, head, token, stage)
            refill(value_ring, values, batch, head, token, stage)
            stage, phase = advance(stage, phase, STAGES)
        block = ahead
    return stage, phase


@gluon.constexpr_function
def product_layout(columns):
    """The layout of a product (PART, columns) of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def shares_layout():
    """The layout of (PART, THREADS): what each thread has for its share of a product's row."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.constexpr_function
def operand_layout(product):
    """The layout of the left operand of a product, of 16 bits in registers."""
    return gl.DotOperandLayout(operand_index=0, parent=product, k_width=2)


@gluon.jit
def operand(matrix, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """A product in registers as the left operand of another, of layout LAYOUT."""
    return gl.convert_layout(matrix.to(DTYPE), operand_layout(LAYOUT), assert_trivial=True)


@gluon.jit
def release(ring, stage):
    """Hands a buffer back to the partition that fills it."""
    mbarrier.arrive(ring.emptied.index(stage), count=1)


@gluon.jit
def locate(call, tile, SHARE: gl.constexpr):
    """(batch index, head, block row) of a tile.

    SHARE: 1 where tiles are counted over query heads; the query heads of a key head where they
    are counted over key heads.
    """
    table, sizes = call.table, call.sizes
    heads = sizes.heads // SHARE
    wave = sizes.together * sizes.rows
    first = tile // wave * sizes.together
    together = gl.minimum(sizes.together, sizes.tiles // sizes.rows - first)
    pair = first + tile % wave % together
    rank = tile % wave // together
    batch = pair // heads
    head = pair % heads
    layer = gl.load(table.head_layer + head * SHARE % sizes.mask_heads)
    return batch, head, gl.load(table.order + layer * sizes.rows + rank)


@gluon.jit
def key_length(call, batch):
    """How many keys a batch element has."""
    length = call.sizes.k_len
    if call.key_lengths is not None:
        length = gl.load(call.key_lengths + batch)
    return length


@gluon.jit
def walk_row(call, batch, head, row):
    """All blocks of a block row of a query head."""
    table, sizes = call.table, call.sizes
    layer = gl.load(table.head_layer + head % sizes.mask_heads)
    entry = table.bounds + (layer * sizes.rows + row) * 4
    full_start, fulls = gl.load(entry), gl.load(entry + 1)
    partial_start, partials = gl.load(entry + 2), gl.load(entry + 3)
    return Walk(key_length(call, batch), partial_start, partials, fulls * 0, full_start, fulls)


@gluon.jit
def walk_keys(call, batch, head, row):
    """The blocks of a row of queries that hold keys of the batch element."""
    walk = walk_row(call, batch, head, row)
    if call.key_lengths is not None:
        length, start, full_start = walk.length, walk.partial_start, walk.full_start
        reached = gl.cdiv(length, call.block)
        partials = count_below(call.table.partial_index, start, walk.partials, reached)
        fulls = count_below(call.table.full_index, full_start, walk.fulls, length // call.block)
        upto = count_below(call.table.full_index, full_start, walk.fulls, reached)
        walk = Walk(length, start, partials, upto - fulls, full_start, fulls)
    return walk


@gluon.jit
def walk_queries(call, batch, head, row):
    """The blocks of a row of keys: none if the batch element has none of its keys."""
    walk = walk_row(call, batch, head, row)
    if call.key_lengths is not None:
        inside = row * call.block < walk.length
        partials = gl.where(inside, walk.partials, 0)
        fulls = gl.where(inside, walk.fulls, 0)
        walk = Walk(walk.length, walk.partial_start, partials, walk.cuts, walk.full_start, fulls)
    return walk


@gluon.jit
def listed_token(call, walk, i, TOKENS: gl.constexpr):
    """The first token of the i-th tile of TOKENS tokens of a walk."""
    PARTS: gl.constexpr = call.block // TOKENS
    return listed_block(call, walk, i // PARTS) * call.block + i % PARTS * TOKENS


@gluon.jit
def listed_block(call, walk, i):
    """The i-th block of a walk."""
    table = call.table
    is_partial = i < walk.partials
    after = i - walk.partials - walk.cuts
    partial = table.partial_index + walk.partial_start + i
    full = table.full_index + walk.full_start + gl.where(after < 0, walk.fulls, after)
    block = gl.load(partial, mask=is_partial, other=0)
    return block + gl.load(full, mask=is_partial == 0, other=0)


@gluon.jit
def count_below(index, start, count, limit):
    """How many of the ascending entries index[start : start + count] are below `limit`."""
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if gl.load(index + start + middle) < limit:
            low = middle + 1
        else:
            high = middle
    return low
