"""Configurations of the triton backend that an H200 uses."""

from experiments.instruments import tuning
from sparseflash.backends.triton import configs

H200 = (90, 232448)  # compute capability, bytes of shared memory


def configuration_in_use(which, problem):
    """That of an H200."""
    dtype, block_size = tuning.DTYPES[problem.dtype], (problem.block_size, problem.block_size)
    facts = (which, *H200, dtype, problem.head_dim, block_size)
    return configs.choose(*facts, tma=True, packed_rows=problem.packed)
