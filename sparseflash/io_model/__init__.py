"""The IO model: FLOPs, exponentials and bytes of each level of memory, and the least time.

Accesses, in elements (not bytes), for one head with N queries and N keys of d dims:

- Standard attention (Algorithm 0 and its backward pass) writes and reads S and P, N x N each:
  Theta(N d + N^2) accesses of slow memory (Theorem 2).
- FlashAttention holds a tile of B queries in fast memory and reads all keys and values once for
  each of N / B tiles: N / B * 2 N d = Theta(N^2 d^2 / M) accesses, because B d = Theta(M) elements
  fit into fast memory (Theorem 2). By Proposition 3 no exact algorithm is better for all M.
- Block-sparse FlashAttention reads only the keys and values of non-zero blocks:
  Theta(N d + N^2 d^2 s / M) accesses (Proposition 4). So does its backward pass (Theorem 5).

The model uses the tiles that the backends choose, and counts blocks in the lookup table that the
kernels read. A GPU has two slow memories. All tiles are loaded through L2; their bytes,
`l2_bytes`, are what the theorems count. A tile that L2 still holds is not read from device memory
again; the bytes of device memory are `memory_bytes`.

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
