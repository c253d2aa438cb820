"""Code that Triton compiles. No host code: its tensors have no static types.

block_lists  which work tile a program computes, and the blocks that its row lists
tensors      tiles of queries, keys and values: loads, stores, TMA descriptors
scores       pairs without weight: element masks, dropout
forward, decode, dq, dkdv, ds_sums, lse_delta    the kernels
"""
