"""Masks that are made where operations have no values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import masks

NEAR = masks.pattern(lambda q, k: (q - k).abs() % 7 < 2)
PATTERNS = (
    masks.full(),
    masks.causal(),
    masks.local(20) | masks.global_tokens(3),
    masks.random(0.3),
    masks.butterfly(),
    masks.documents([100, 200]),
    ~masks.dilated(4, 3),
    masks.stack([masks.local(3), NEAR]),
    NEAR,
)


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_patterns_are_compiled_in_fake_tensor_mode(pattern):
    expected = pattern(300, 16)
    with FakeTensorMode():
        mask = pattern(300, 16)
        shown = repr(mask)
    assert mask == expected
    assert mask.table().nbytes == expected.table().nbytes
    assert shown == repr(expected)


def test_block_masks_are_combined_in_fake_tensor_mode():
    near, early = masks.local(20)(300, 16), masks.causal()(300, 16)
    with FakeTensorMode():
        made = (near & early, near | early, near - early, near ^ early, ~near)
    assert made == (near & early, near | early, near - early, near ^ early, ~near)
    assert all(type(mask.block_set.partial) is torch.Tensor for mask in made)
