import copy
import gc
import pickle

import pytest
import torch

import masks
from masks.registry import MAX_ENTRIES, Cache, find


@pytest.mark.parametrize("mask", [masks.causal(), masks.causal()(64, 16)], ids=repr)
def test_a_handle_finds_its_mask_and_copies_are_the_mask(mask):
    assert find(mask.handle) is mask
    assert copy.deepcopy({"mask": mask})["mask"] is copy.copy(mask) is mask


@pytest.mark.parametrize("mask", [masks.causal(), masks.causal()(64, 16)], ids=repr)
def test_and_does_not_join_masks(mask):
    with pytest.raises(TypeError, match="combine masks with &"):
        assert not (mask and mask)


def test_handles_are_of_one_object_only():
    assert masks.causal().handle != masks.causal().handle
    mask = masks.causal()(64, 16)
    again = pickle.loads(pickle.dumps(mask))
    assert find(again.handle) is again is not mask
    assert again == mask


def test_a_handle_without_its_mask():
    handle = masks.causal().handle
    gc.collect()
    with pytest.raises(LookupError, match=handle):
        find(handle)


def test_a_full_cache_is_emptied():
    cache = Cache(most=3)
    for n in range(4):
        cache[n] = n
    assert cache == {3: 3}


@pytest.mark.parametrize("batch", [False, True])
def test_tables_live_as_long_as_their_mask(batch):
    mask = masks.causal()(64, 16)
    mask = masks.MaskBatch(masks.stack([mask, mask]), 2) if batch else mask
    table = mask.table()
    for n in range(MAX_ENTRIES + 1):
        mask.cache[n] = n
    assert mask.cache == {MAX_ENTRIES: MAX_ENTRIES}
    assert mask.table() is table


def test_pickles_carry_neither_tables_nor_caches():
    mask = masks.local(30)(4096, 16)
    small = len(pickle.dumps(mask))
    mask.table()
    mask.coverage((128, 128))
    mask.cache["call"] = torch.zeros(10_000)
    assert len(pickle.dumps(mask)) == small
