"""Masks that patterns were compiled to, and that they can be forgotten."""

import gc
import weakref

import pytest
import torch

import masks
import sparseflash
from sparseflash.dispatch.plan import compiled_mask
from sparseflash.nn.decode_masks import decode_mask


@pytest.mark.parametrize(
    "compiled",
    [
        lambda pattern, tensor: compiled_mask(pattern, tensor, tensor),
        lambda pattern, tensor: decode_mask(pattern, 64, 3, 4, 40, tensor.device),
    ],
    ids=["attention", "decoding"],
)
def test_masks_of_patterns_are_kept_until_the_cache_is_cleared(compiled):
    pattern, tensor = masks.local(5).with_block_size(16), torch.randn(1, 1, 64, 8)
    mask = compiled(pattern, tensor)
    assert compiled(masks.local(5).with_block_size(16), tensor) is mask
    reference = weakref.ref(mask)
    del mask
    gc.collect()
    assert reference() is not None
    sparseflash.clear_cache()
    gc.collect()
    assert reference() is None
