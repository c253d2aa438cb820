"""Sums over pairs for each entry of score tensors, to which many programs add atomically.

Floating-point sums depend on the order of the summands, so their last bits differ from run to run.
Fixed-point sums of integers have the same bits in every run. The scale of an entry is its largest
summand, which is found by an earlier run of the pass.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class ReadSums(NamedTuple):
    """Memory for the sums, one for each entry of all floating-point score tensors.

    any_order: float32 sums; None if the bits must be the same in every run
    largest:   int32, the bits of the largest magnitude of the summands. As integers, these bits
        have the order of the magnitudes, with NaN as the largest
    fixed:     int64 sums in units of largest / steps; None in the run that finds `largest`
    steps:     number of units in the largest summand
    """

    any_order: tl.tensor
    largest: tl.tensor
    fixed: tl.tensor
    steps: tl.tensor


@triton.jit
def add_read(sums, entry, values):
    """Adds values (BM, BN) to the sums at `entry`, which broadcasts to them.

    If a whole row, column or tile reads one entry, its values are summed first.
    """
    if len(entry.shape) == 0:
        values = tl.sum(tl.sum(values, 1), 0)
    else:
        if entry.shape[0] == 1:
            values = tl.sum(values, 0, keep_dims=True)
        if entry.shape[1] == 1:
            values = tl.sum(values, 1, keep_dims=True)
    some = values != 0.0
    if sums.any_order is not None:
        tl.atomic_add(sums.any_order + entry, values, mask=some, sem="relaxed")
    elif sums.fixed is None:
        bits = tl.abs(values).to(tl.int32, bitcast=True)
        tl.atomic_max(sums.largest + entry, bits, mask=some, sem="relaxed")
    else:
        largest = tl.load(sums.largest + entry, mask=some, other=1).to(tl.float32, bitcast=True)
        units = tl.floor(values / largest * sums.steps + 0.5).to(tl.int64)
        tl.atomic_add(sums.fixed + entry, units, mask=some, sem="relaxed")
