"""Masks of decoding steps: rows of a mask that many steps share."""

import torch

from masks import BlockMask, Pattern
from sparseflash.compiled import stores_masks


def shared_length(tokens: int) -> int:
    """The next power of two, a length that many steps share, so that they share a mask."""
    return 1 << (tokens - 1).bit_length()


@stores_masks(maxsize=256)
def decode_mask(
    pattern: Pattern, length: int, begin: int, end: int, k_len: int, device: torch.device
) -> BlockMask:
    """The mask of some queries and keys of a pattern, on the CPU.

    Args:
        pattern: The pattern; its mask of all tokens is compiled once.
        length: Length at which it is compiled, in tokens.
        begin, end: First query, and end of the queries.
        k_len: Number of keys.
        device: Device on which it is compiled.
    """
    return _square(pattern, length, device).slice_queries(begin, end).crop(end - begin, k_len)


@stores_masks(maxsize=32)
def _square(pattern: Pattern, length: int, device: torch.device) -> BlockMask:
    """The mask of all tokens. On the CPU, so that slicing it does not wait for the device."""
    return pattern(length, device=device).to("cpu")
