"""The same random masks through sparseflash, FlexAttention and dense attention in float64."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import sparseflash
from masks import BlockMask, interop
from sparseflash.reference import standard_attention
from sparseflash.testing import assert_close_to_reference, check_attention, make_inputs

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda", "hopper": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}


def random_mask(heads: int, lengths: tuple[int, int], block_size: int, device: str) -> BlockMask:
    """Full, empty and random blocks; every query has a key: FlexAttention defines no other."""
    grid = [-(-n // block_size) for n in lengths]
    kind = torch.randint(0, 3, (heads, *grid))
    kind = kind.repeat_interleave(block_size, 1).repeat_interleave(block_size, 2)
    kind = kind[:, : lengths[0], : lengths[1]]
    dense = (kind == 2) | ((kind == 1) & (torch.rand(heads, *lengths) < 0.5))
    dense[..., 3] = True
    return BlockMask.from_dense(dense, block_size).to(device)


def hold_both(backend, mask, tensors):
    """Our attention and FlexAttention, both within the error budget of dense float64."""
    ours = partial(sparseflash.attention, mask=mask, return_lse=True, backend=backend)
    flex_mask = interop.to_flex(mask)
    flex = partial(flex_attention, block_mask=flex_mask, return_lse=True, enable_gqa=True)
    query, key, value, grad_out = tensors
    check_attention(ours, query, key, value, mask, grad_out=grad_out)
    if HAS_GPU:
        check_attention(flex, query, key, value, mask, grad_out=grad_out)
    else:  # where FlexAttention has no gradient
        check_forward(flex, query, key, value, mask)


def check_forward(attend, query, key, value, mask):
    reference, eager = (
        standard_attention(query, key, value, mask, dtype=dtype)
        for dtype in (torch.float64, query.dtype)
    )
    for name, *results in zip(
        ("out", "lse"), attend(query, key, value), reference, eager, strict=True
    ):
        assert_close_to_reference(*results, dtype=query.dtype, name=name)


# Uncompiled, FlexAttention materialises the scores and says so once in a process.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "hopper"])
def test_on_short_sequences(backend, seed):
    torch.manual_seed(seed)
    device, lengths = BACKENDS[backend], (40 + seed, 50)
    mask = random_mask(1 + seed % 2, lengths, 16, device)
    tensors = make_inputs(2, 2, *lengths, 16, kv_heads=1, device=device, seed=seed)
    hold_both(backend, mask, tensors)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_long_sequences(backend, seed, dtype):
    torch.manual_seed(seed)
    lengths = (1000 + 77 * seed, 1300 - 50 * seed)
    mask = random_mask(1 if seed % 2 else 4, lengths, 128, "cuda")
    tensors = make_inputs(2, 4, *lengths, 128, kv_heads=2, dtype=dtype, device="cuda", seed=seed)
    hold_both(backend, mask, tensors)
