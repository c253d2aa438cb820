"""Register budgets of the warp roles: registers per thread, by setmaxnreg.

A CTA of two or three consumer warpgroups has all 65,536 registers of a multiprocessor. setmaxnreg
acts on warpgroups, so Triton pads the producer and the load-wait warp to one of four warps.
"""

from sparseflash.backends.hopper.device.gluon_compat import gl

# With two consumer warpgroups: the largest multiple of 8 that fits, as 2 * 128 * 240 + 128 * 24 =
# 64,512 registers. Triton gives the first consumer, which is its default partition, what the other
# partitions do not take.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)  # of the load-wait warp too
# With three consumer warpgroups: 3 * 128 * 160 + 128 * 32 = 65,536 registers.
REGISTERS_OF_3_CONSUMERS = gl.constexpr(160)
REGISTERS_BESIDE_3_CONSUMERS = gl.constexpr(32)
# Beside the dQ warpgroup of the fused kernel: 2 * 128 * 208 + 128 * 72 + 128 * 24 = 65,536.
CONSUMER_REGISTERS_BESIDE_DQ = gl.constexpr(208)
DQ_REGISTERS = gl.constexpr(72)
# Up to this width, and with at most two consumer warpgroups, registers of the forward kernel hold
# Q, so that products read K alone from shared memory. Others have none for Q beside O and S.
MAX_QUERY_REGISTER_DIMS = gl.constexpr(128)
