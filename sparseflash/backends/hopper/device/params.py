"""The parameters of a kernel, compile-time and run-time, grouped in tuples for device code."""

from typing import NamedTuple

from sparseflash.backends.hopper.device.gluon_compat import gl, gluon
from sparseflash.backends.hopper.device.pipeline import Pipeline
from sparseflash.backends.triton_common import arguments, constants
from sparseflash.backends.triton_common.score_mods import ScorePointers

LOG2E = gl.constexpr(constants.LOG2E.value)
LN2 = gl.constexpr(constants.LN2.value)
NEG_INF = gl.constexpr(float("-inf"))


class Table(NamedTuple):
    """One direction of a masks.LookupTable; rows, also of bit tiles, are of queries or of keys."""

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
    num_rows:        block rows of a mask that the kernel computes, all or those of the only mask
        that have blocks
    num_work_tiles:  block rows of all heads and batch elements
    heads_per_group: heads whose work tiles are scheduled together, longest first (LPT)
    mask_batch_stride: stride of head_to_mask from one batch element to the next; None if all
        batch elements share their masks
    own_columns:     block columns in keys and values, if there are no key lengths and the others
        are in more_keys and more_values; else None
    """

    heads: gl.tensor
    q_len: gl.tensor
    k_len: gl.tensor
    mask_heads: gl.tensor
    num_rows: gl.tensor
    num_work_tiles: gl.tensor
    heads_per_group: gl.tensor
    mask_batch_stride: gl.tensor
    own_columns: gl.tensor


class Dropout(NamedTuple):
    """All None without dropout.

    seed_low, seed_high: the words of the seed, as signed integers
    threshold:           least random number that keeps a pair
    keep_scale:          1 / the probability that dropout keeps a pair
    """

    seed_low: gl.tensor
    seed_high: gl.tensor
    threshold: gl.tensor
    keep_scale: gl.tensor


class ScoreParams(NamedTuple):
    """What changes S besides the scale (see scores.py); each field is None if unused.

    softcap:     c of c tanh(S / c)
    bias:        one number for each distance between key and query
    bias_stride: stride of bias from one head to the next, 0 if all heads share one bias
    pointers:    score tensors
    """

    softcap: gl.tensor
    bias: gl.tensor
    bias_stride: gl.tensor
    pointers: ScorePointers


@gluon.constexpr_function
def has_score_mod(softcap, bias, function):
    """Whether a soft cap, a score function or a bias changes S."""
    return bias is not None or softcap is not None or function is not None


@gluon.constexpr_function
def has_derivative(softcap, function):
    """Whether dS has the derivative of a soft cap or a score function as a factor."""
    return softcap is not None or function is not None


class Params(NamedTuple):
    """The parameters that every warp role of a kernel reads.

    The constexpr fields are constexpr only while the tuple is passed as an argument. Assigning it
    to another name makes them run-time values. They are not in a nested tuple: gl.warp_specialize
    of Triton 3.6 makes constexprs of nested tuples run-time values.

    row_tokens, column_tokens: tokens of a block row of the table, and of a block column
    key_lengths:  keys of every batch element, or None
    work_counter: atomic counter of the dynamic tile scheduler, or None
    work_queue:   the pipeline through which the producer publishes work tiles
    scale_log2:   scale * log2(e)
    score_function, has_score_mod, has_derivative: None, False, False if S = scale Q K^T
    """

    row_tokens: gl.constexpr
    column_tokens: gl.constexpr
    table: Table
    sizes: Sizes
    key_lengths: gl.tensor
    work_counter: gl.tensor
    work_queue: Pipeline
    scale_log2: gl.tensor
    dropout: Dropout
    score_params: ScoreParams
    score_function: gl.constexpr
    has_score_mod: gl.constexpr
    has_derivative: gl.constexpr


class Constants(NamedTuple):
    """Compile-time constants of the mainloop of one warpgroup.

    They are constexpr only while the tuple is passed as an argument, so each call builds it.

    S_LAYOUT:   accumulator layout of S and dP
    ACC_LAYOUT: accumulator layout of what the mainloop sums: O, dQ, or dK and dV
    """

    WARPGROUP: gl.constexpr
    STAGES: gl.constexpr
    S_LAYOUT: gl.constexpr
    ACC_LAYOUT: gl.constexpr


def unspecialized_arguments(*pointers: str) -> dict[str, list[str]]:
    """Keywords of gluon.jit: arguments for whose values Triton compiles no variant.

    Args:
        pointers: Names of the pointers of the kernel besides those of Params.
    """
    return arguments.unspecialized_arguments(
        integers=[*Sizes._fields, *Dropout._fields, "bias_stride"],
        alignments=[
            *(*Table._fields, "key_lengths", "work_counter", *arguments.OF_SCORES, *pointers)
        ],
    )
