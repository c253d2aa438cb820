"""The masks of steps of decoding against rows of the whole pattern."""

import pytest
import torch

import masks
from sparseflash.nn.decode_masks import decode_mask, shared_length

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_steps_share_the_next_power_of_two(tokens, length):
    assert shared_length(tokens) == length


def test_rows_are_those_of_the_pattern_and_cut_out_once():
    pattern = masks.local(20).with_block_size(16)
    whole = pattern(128).to_dense()
    for begin, end, k_len in ((64, 65, 65), (70, 83, 128), (100, 101, 128)):
        mask = decode_mask(pattern, 128, begin, end, k_len, CPU)
        assert torch.equal(mask.to_dense(), whole[begin:end, :k_len])
        assert mask is decode_mask(pattern, 128, begin, end, k_len, CPU)
