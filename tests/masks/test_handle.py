import copy
import gc
import pickle

import pytest

import masks
from masks.handle import find


@pytest.mark.parametrize("mask", [masks.causal(), masks.causal()(64, 16)], ids=repr)
def test_a_handle_finds_its_mask_and_copies_are_the_mask(mask):
    assert find(mask.handle) is mask
    assert copy.deepcopy({"mask": mask})["mask"] is copy.copy(mask) is mask


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
