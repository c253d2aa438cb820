"""Register budgets of the warp roles: registers per thread, by setmaxnreg.

A CTA of two warpgroups and up to two more warps has all 65536 registers of a multiprocessor.
"""

from sparseflash.backends.hopper.device.gluon_compat import gl

CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)  # of the load-wait warp too
# Up to this width registers of the forward kernel hold Q, which then leaves shared memory once.
MAX_QUERY_REGISTER_DIMS = gl.constexpr(128)
