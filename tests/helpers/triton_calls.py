"""Calls of the triton backend alone: on the GPU where there is one, else in the interpreter."""

import math
from functools import partial

import torch

from masks.block_mask import BlockMask
from sparseflash.backends import triton as triton_backend
from sparseflash.dispatch.autograd import run
from sparseflash.testing import check_attention, poisoned_empty
from tests.helpers.calls import call_on

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
DTYPES = [torch.float32, torch.float16]
if DEVICE.type == "cuda":
    DTYPES.append(torch.bfloat16)


def mixed_mask(q_len, k_len, block_size, num_masks=1, seed=0):
    """bool (num_masks, q_len, k_len) of full, empty and random blocks.

    The second block row and the third block column are empty, and so is the first query.
    """
    generator = torch.Generator().manual_seed(seed)
    bq, bk = block_size
    rows, columns = math.ceil(q_len / bq), math.ceil(k_len / bk)
    kind = torch.randint(0, 3, (num_masks, rows, columns), generator=generator)
    kind[:, 0, 0] = 1
    kind[:, -1, -1] = 2
    kind[:, 1:2] = 0
    kind[:, :, 2:3] = 0
    kind = kind.repeat_interleave(bq, 1).repeat_interleave(bk, 2)[:, :q_len, :k_len]
    random = torch.rand(num_masks, q_len, k_len, generator=generator) < 0.5
    mask = (kind == 2) | ((kind == 1) & random)
    mask[:, 0] = False
    return mask


def block_sparse(query, key, value, mask, *, scale=None, dropout_p=0.0, key_lengths=None, seed=0):
    """(out, lse) of the backend through the autograd boundary."""
    options = {"scale": scale, "dropout_p": dropout_p, "key_lengths": key_lengths, "seed": seed}
    call = call_on(triton_backend, query, key, mask, **options)
    assert triton_backend.why_not(call.spec, mask) == []
    with poisoned_empty():
        return run(call, query, key, value)


def check(inputs, dense, block_size, **options):
    """Holds the backend to the error budget; `dense` is bool (heads or 1, q_len, k_len)."""
    query, key, value, grad_out = inputs
    mask = BlockMask.from_dense(dense if len(dense) > 1 else dense[0], block_size)
    attention = partial(block_sparse, mask=mask, **options)
    dense = dense.to(query.device)
    with poisoned_empty():  # in the backward pass too
        return check_attention(attention, query, key, value, dense, grad_out=grad_out, **options)
