"""Masks of decoding steps: a few rows of a pattern, cut out of one mask for many steps."""

import torch

from masks import BlockMask, Pattern
from sparseflash.compiled import stores_masks


def shared_length(tokens: int) -> int:
    """The next power of two: a length that many steps share, and with it what is compiled."""
    return 1 << (tokens - 1).bit_length()


@stores_masks(maxsize=256)
def decode_mask(
    pattern: Pattern, length: int, begin: int, end: int, k_len: int, device: torch.device
) -> BlockMask:
    """The mask of the queries `begin` to `end` and of the first k_len keys, of a pattern at
    `length` (all in tokens), which is compiled once on `device`. The mask is on the CPU.
    """
    return _square(pattern, length, device).slice_queries(begin, end).crop(end - begin, k_len)


@stores_masks(maxsize=32)
def _square(pattern: Pattern, length: int, device: torch.device) -> BlockMask:
    """Made on the device and moved to the CPU: to slice it must not wait for the device."""
    return pattern(length, device=device).to("cpu")
