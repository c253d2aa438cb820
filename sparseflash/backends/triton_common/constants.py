"""Constants of kernels in Triton."""

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ALIGNMENT = 16  # bytes: the widest load of a thread; what addresses and strides of TMA divide by
# From this ratio on of the longest block row to the mean, the longest rows of all heads start
# first: all other programs would wait for one that started such a row last.
LONGEST_FIRST_IMBALANCE = 3
