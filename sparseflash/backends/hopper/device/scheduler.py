"""The tile scheduler, and the queue by which the producer publishes work tiles to the other warps.

A work tile is one block row of one (batch, head), or of packed heads. Only the producer decodes it
and reads its row of the table: that takes several dependent loads, for which consumers would wait
at the beginning of every work tile.
"""

from typing import NamedTuple

from sparseflash.backends.hopper.device.barriers import (
    LOAD_WAIT_WARP_BARRIER,
    PRODUCER_WARP_BARRIER,
    sync_warp,
)
from sparseflash.backends.hopper.device.block_list import RowBlocks, mask_of_head
from sparseflash.backends.hopper.device.gluon_compat import gl, gluon
from sparseflash.backends.hopper.device.pipeline import (
    Pipeline,
    advance,
    consumer_release,
    consumer_wait,
    make_mbarriers,
    producer_acquire,
    producer_commit,
)

WORK_QUEUE_DEPTH = gl.constexpr(4)  # work tiles that are published ahead
WORK_TILE_FIELDS = gl.constexpr(9)  # integers of a published work tile:
ROW, BATCH, HEAD, PARTIAL_START, N_PARTIAL, FULL_START, N_FULL, KEY_LENGTH, N_CLIPPED = map(
    gl.constexpr, range(WORK_TILE_FIELDS.value)
)


class WorkTile(NamedTuple):
    """One block row of one head, or of packed heads.

    head: key head in kernels whose work tiles are block rows of keys, else query head, the first
        one of packed heads
    row:  block row; -1 after the last work tile
    """

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    blocks: RowBlocks


@gluon.jit
def make_work_queue(CONSUMERS: gl.constexpr):
    """A pipeline of WORK_TILE_FIELDS integers per stage; CONSUMERS partitions read each stage."""
    buffers = gl.allocate_shared_memory(
        gl.int32, [WORK_QUEUE_DEPTH * WORK_TILE_FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    full_barriers = make_mbarriers(WORK_QUEUE_DEPTH, 1)
    empty_barriers = make_mbarriers(WORK_QUEUE_DEPTH, CONSUMERS)
    return Pipeline(buffers, full_barriers, empty_barriers)


@gluon.jit
def next_work_id(params, work_id, next_of_work=None):
    """The work tile of this CTA after `work_id`; the first one is the index of the CTA.

    The scheduler is static if all rows take about the same time: CTAs stride over the work tiles.
    Otherwise it is dynamic: each CTA takes the next work tile from an atomic counter. If sums of
    dQ are ordered, the work tiles of each CTA are listed.

    next_of_work: for each work tile the next one of the same CTA, or None
    """
    next_work = work_id + gl.num_programs(0)
    if next_of_work is not None:
        next_work = gl.load(next_of_work + work_id)
    if params.work_counter is not None:
        if params.dropout.threshold is None:
            next_work = gl.num_programs(0) + gl.atomic_add(params.work_counter, 1, sem="relaxed")
        else:
            next_work = gl.num_programs(0) + atomic_increment(params.work_counter)
    return next_work


@gluon.jit
def atomic_increment(counter):
    """gl.atomic_add(counter, 1) by one warp, without shared memory.

    A scalar one takes a multiple of 128 bytes, which 128 dims with dropout do not leave.
    """
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    none = lanes * 0
    taken = gl.atomic_add(counter + none, none + 1, mask=lanes == 0, sem="relaxed")
    return gl.max(gl.where(lanes == 0, taken, 0), axis=0)


@gluon.jit
def decode_work_id(params, work_id, QHEADS_PER_WORK_TILE: gl.constexpr):
    """(batch, head, block row) of a work tile.

    Groups of heads follow one another. Within a group the longest rows of all heads come first.

    QHEADS_PER_WORK_TILE: 1 if a work tile belongs to a query head; the number of query heads of a
        key head if it belongs to a key head; PACKED_HEADS in the forward kernel. `head` counts
        these heads or groups of heads.
    """
    table, sizes = params.table, params.sizes
    heads = sizes.heads // QHEADS_PER_WORK_TILE
    tiles_per_group = sizes.heads_per_group * sizes.num_rows
    first_bh = work_id // tiles_per_group * sizes.heads_per_group
    # The last group may have fewer heads.
    heads_left = sizes.num_work_tiles // sizes.num_rows - first_bh
    heads_in_group = gl.minimum(sizes.heads_per_group, heads_left)
    bh = first_bh + work_id % tiles_per_group % heads_in_group
    schedule_index = work_id % tiles_per_group // heads_in_group
    batch = bh // heads
    head = bh % heads
    mask = mask_of_head(params, batch, head * QHEADS_PER_WORK_TILE)
    return batch, head, gl.load(table.schedule + mask * sizes.num_rows + schedule_index)


@gluon.jit
def publish_work(params, work, state):
    """Publishes a work tile; returns the state of the next one."""
    acquire_work_stage(params, state)
    stage, blocks = state.stage, work.blocks
    # The blocks too: otherwise consumers would read row_ptr again, while no product runs.
    write_field(params, stage, ROW, work.row)
    write_field(params, stage, BATCH, work.batch)
    write_field(params, stage, HEAD, work.head)
    write_field(params, stage, PARTIAL_START, blocks.partial_start)
    write_field(params, stage, N_PARTIAL, blocks.n_partial)
    write_field(params, stage, FULL_START, blocks.full_start)
    write_field(params, stage, N_FULL, blocks.n_full)
    if params.key_lengths is not None:
        write_field(params, stage, KEY_LENGTH, blocks.key_length)
        write_field(params, stage, N_CLIPPED, blocks.n_clipped)
    commit_work_stage(params, state)
    return advance(state, WORK_QUEUE_DEPTH)


@gluon.jit
def publish_end(params, state):
    """Publishes that no work tile follows."""
    acquire_work_stage(params, state)
    write_field(params, state.stage, ROW, -1)
    commit_work_stage(params, state)


@gluon.jit
def acquire_work_stage(params, state):
    producer_acquire(params.work_queue, state)
    sync_warp(PRODUCER_WARP_BARRIER)


@gluon.jit
def commit_work_stage(params, state):
    sync_warp(PRODUCER_WARP_BARRIER)
    producer_commit(params.work_queue, state)


@gluon.jit
def receive_work(params, state):
    """(the published work tile, the state of the next one)"""
    stage = state.stage
    # Twice, because racecheck of compute-sanitizer ignores a wait whose first try fails.
    consumer_wait(params.work_queue, state)
    sync_single_warp()
    consumer_wait(params.work_queue, state)
    sync_single_warp()
    row = read_field(params, stage, ROW)
    batch, head = read_field(params, stage, BATCH), read_field(params, stage, HEAD)
    partial_start = read_field(params, stage, PARTIAL_START)
    n_partial = read_field(params, stage, N_PARTIAL)
    full_start, n_full = read_field(params, stage, FULL_START), read_field(params, stage, N_FULL)
    key_length, n_clipped = params.sizes.k_len, n_full * 0
    if params.key_lengths is not None:
        key_length = read_field(params, stage, KEY_LENGTH)
        n_clipped = read_field(params, stage, N_CLIPPED)
    sync_single_warp()
    consumer_release(params.work_queue, state)
    state = advance(state, WORK_QUEUE_DEPTH)
    blocks = RowBlocks(key_length, partial_start, n_partial, n_clipped, full_start, n_full)
    return WorkTile(batch, head, row, blocks), state


@gluon.jit
def sync_single_warp():
    """sync_warp in a partition of one warp; Triton synchronises warpgroups itself."""
    if gl.num_warps() == 1:
        sync_warp(LOAD_WAIT_WARP_BARRIER)


@gluon.jit
def write_field(params, stage, FIELD: gl.constexpr, value):
    value = gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    params.work_queue.buffers.index(stage * WORK_TILE_FIELDS + FIELD).store(value)


@gluon.jit
def read_field(params, stage, FIELD: gl.constexpr):
    value = params.work_queue.buffers.index(stage * WORK_TILE_FIELDS + FIELD)
    # The maximum of one element turns it into a scalar.
    return gl.max(value.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), axis=0)
