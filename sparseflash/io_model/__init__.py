"""What attention costs: products, exponentials, bytes of each level of memory, the least time.

For one head of N queries and keys of d dims, in numbers (not bytes):

- standard attention (Algorithm 0 and its backward pass) writes and reads S and P, N x N each:
  Theta(N d + N^2) accesses of slow memory (Theorem 2);
- FlashAttention keeps a tile of B queries in fast memory and reads all keys and values once for
  each of N / B tiles: N / B * 2 N d = Theta(N^2 d^2 / M) accesses, for B d = Theta(M) numbers fit
  into fast memory (Theorem 2); Proposition 3 says that no exact algorithm does better for all M;
- block-sparse FlashAttention reads those of non-zero blocks: Theta(N d + N^2 d^2 s / M)
  (Proposition 4), and its backward pass as many (Theorem 5).

Here the tiles are those that the backends choose, and blocks are counted in the lookup table that
their kernels read. On a GPU there are two slow memories. Every tile comes through L2: that is the
count of the theorems, `l2_bytes`. What L2 still holds from another tile is not read from device
memory again: `memory_bytes`.

Reference:
    Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022, sections 3.1 to 3.3, appendices B to D.
"""

from sparseflash.io_model.cost import DIRECTIONS, Cost, KernelCost
from sparseflash.io_model.device import DEVICES, Device, device_like, device_named
from sparseflash.io_model.flash import BACKENDS, attention
from sparseflash.io_model.standard import standard_attention

__all__ = [
    "BACKENDS",
    "DEVICES",
    "DIRECTIONS",
    "Cost",
    "Device",
    "KernelCost",
    "attention",
    "device_like",
    "device_named",
    "standard_attention",
]
