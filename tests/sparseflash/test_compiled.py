"""Masks that patterns were compiled to, and that they can be forgotten."""

import gc
import weakref

import pytest
import torch

import masks
import sparseflash
from sparseflash import compiled
from sparseflash.dispatch.plan import compiled_mask
from sparseflash.nn.decode_masks import decode_mask


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda pattern, tensor: compiled_mask(pattern, tensor, tensor),
        lambda pattern, tensor: decode_mask(pattern, 64, 3, 4, 40, tensor.device),
    ],
    ids=["attention", "decoding"],
)
def test_masks_of_patterns_are_kept_until_the_cache_is_cleared(mask_of):
    pattern, tensor = masks.local(5).with_block_size(16), torch.randn(1, 1, 64, 8)
    mask = mask_of(pattern, tensor)
    assert mask_of(masks.local(5).with_block_size(16), tensor) is mask
    reference = weakref.ref(mask)
    del mask
    gc.collect()
    assert reference() is not None
    sparseflash.clear_cache()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("captured", [True, False])
def test_masks_of_patterns_that_a_cuda_graph_reads_are_kept(captured, monkeypatch):
    monkeypatch.setattr(compiled, "_of_graphs", {})
    pattern, tensor = masks.local(5).with_block_size(16), torch.randn(1, 1, 64, 8)
    compiled_mask(pattern, tensor, tensor)  # as the call before a capture does
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    mask = weakref.ref(compiled_mask(pattern, tensor, tensor))
    sparseflash.clear_cache()
    gc.collect()
    assert (mask() is not None) == captured
