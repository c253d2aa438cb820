"""Device code for Triton. It has no host code, because its tensors have no static types.

block_lists  the work tile of a program, and the blocks that its row lists
tensors      tiles of queries, keys and values: loads, stores, TMA descriptors
scores       element masks and dropout
forward, decode, dq, dkdv, ds_sums, lse_delta    the kernels
"""
