"""What a kernel gets: constants and run-time arguments, in the groups that device code takes."""

from typing import NamedTuple

from sparseflash.backends.hopper.device.gluon_compat import gl
from sparseflash.backends.hopper.device.pipeline import Pipeline
from sparseflash.backends.triton_common import arguments, constants

LOG2E = gl.constexpr(constants.LOG2E.value)
LN2 = gl.constexpr(constants.LN2.value)
NEG_INF = gl.constexpr(float("-inf"))


class Table(NamedTuple):
    """One direction of a masks.LookupTable; rows of its bit tiles are those of the direction."""

    row_ptr: gl.tensor
    full_index: gl.tensor
    partial_index: gl.tensor
    partial_bit_tile: gl.tensor
    schedule: gl.tensor
    bit_tiles: gl.tensor
    head_to_mask: gl.tensor


class Sizes(NamedTuple):
    """Run-time integers.

    heads:           query heads
    num_rows:        block rows of a mask in the direction of the kernel
    num_work_tiles:  block rows of all heads, of queries or of keys
    heads_per_group: heads whose work tiles are scheduled together, longest first (LPT)
    """

    heads: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    mask_heads: gl.tensor
    num_rows: gl.tensor
    num_work_tiles: gl.tensor
    heads_per_group: gl.tensor


class Dropout(NamedTuple):
    """All None without dropout.

    seed_low, seed_high: signed words; threshold: less 2^31, so that words compare as signed
    keep_scale:          1 / (1 - dropout_p)
    """

    seed_low: gl.tensor
    seed_high: gl.tensor
    threshold: gl.tensor
    keep_scale: gl.tensor


class Params(NamedTuple):
    """What every warp role of a kernel reads.

    block:        tokens along both sides of a block of the mask. It is a constexpr only while the
        tuple is passed as an argument; rebinding the tuple makes it a run-time value.
    key_lengths:  keys of every batch element, or None
    work_counter: atomic counter of the dynamic tile scheduler, or None
    work_queue:   the pipeline through which the producer publishes work tiles
    scale_log2:   scale * log2(e)
    """

    block: gl.constexpr
    table: Table
    sizes: Sizes
    key_lengths: gl.tensor
    work_counter: gl.tensor
    work_queue: Pipeline
    scale_log2: gl.tensor
    dropout: Dropout


class Constants(NamedTuple):
    """What the mainloop of one warpgroup has as constants.

    They are constexpr only while the tuple is passed as an argument, so it is built in the call.

    S_LAYOUT:   accumulator layout of S and dP
    ACC_LAYOUT: accumulator layout of what the mainloop sums: O, dQ, or dK and dV
    """

    WARPGROUP: gl.constexpr
    STAGES: gl.constexpr
    S_LAYOUT: gl.constexpr
    ACC_LAYOUT: gl.constexpr


def unspecialized_arguments(*pointers: str) -> dict[str, list[str]]:
    """Arguments of gluon.jit for a kernel with a table, sizes and more `pointers`."""
    return arguments.unspecialized_arguments(
        integers=[*Sizes._fields, *Dropout._fields], alignments=[*Table._fields, *pointers]
    )
